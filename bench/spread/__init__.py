"""How long many hosts take to have new weights, over lines of a given speed."""
