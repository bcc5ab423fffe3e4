"""Offload: what regions save of their inputs waits in host memory, or on disk, for backward.

`offloader` sends tensors and brings them back; `pacing` says which layers send, and in which order tensors come back. A
`Link` (`host_buffers`, `disk`) keeps the bytes; a `Wire` (`transfer`, `cuda`) copies them between device and host.
"""
