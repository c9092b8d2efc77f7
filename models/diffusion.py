"""Any transformer of diffusers whose blocks are called one after the other, as a chain of layers: what it is called with, by
name, to what it predicts. How it is cut is in `hetpipe/layers/replay`."""

from hetpipe.diffusion.model import build as build
