"""How many groups members should generate while they are lent."""
