"""seqserve: the wire contract and the SDK of a server for encoder-decoder Transformers."""

__version__ = "0.1.0"

from seqserve.client import AsyncClient, Client
from seqserve.errors import SeqserveError
from seqserve.parameters import GenerationParameters

__all__ = ["AsyncClient", "Client", "GenerationParameters", "SeqserveError", "__version__"]
