"""The teaching face: pictures, widgets, checks."""
