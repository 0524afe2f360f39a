"""The SiTU gated activation."""
