"""A checkpoint as a folder that other programs read, streamed out and proved before it is there."""
