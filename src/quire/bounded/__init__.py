"""What comes from outside, read and worked on within bounds of size, depth, time and memory."""
