"""Readers of what a parameter says of itself: one small file per library that marks its parameters.

Nothing here imports the libraries: they are known by the attributes they leave on parameters.
"""
