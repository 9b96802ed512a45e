"""How to measure honestly: prediction first, interleaved rounds, medians, raw samples kept."""
