"""The four services. They meet only in `shared`, never in each other."""
