"""Datasets: official files, the packed store, transforms and samplers.

Pillow recognises images by their content, whatever their name, and starts Ghostscript for an EPS, without a limit of time or memory.
Here it is prevented for all modules that decode images, as an import of `store/decode.py` imports this package first. That file is part of
every step's identity: changed, it would make all finished results stale.
"""

from PIL import EpsImagePlugin

EpsImagePlugin.gs_binary = False
