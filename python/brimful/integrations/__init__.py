"""Adapters for trainers, each imported only when asked for: ``import brimful.integrations.lightning`` and so on.

Each needs the package of its name, which the extra of the same name installs: ``pip install 'brimful[lightning]'``.
"""
