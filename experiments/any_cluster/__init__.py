"""Are the bits the same on any cluster?"""
