"""Kimi Delta Attention: the short convolution and the gated delta rule."""
