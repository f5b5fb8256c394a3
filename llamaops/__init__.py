"""llamaops: a supervisor around llama.cpp's llama-server for machines without a GPU.

Importing it does nothing: no I/O, no environment reads, no singletons.
"""

__version__ = "0.1.0"
