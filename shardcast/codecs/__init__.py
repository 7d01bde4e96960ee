"""Lossless encodings of a raw shard, whole or relative to the shard before: what travels instead of 8 MiB.

    from shardcast.codecs import Codec, decode, encode, segments_of

    segments = segments_of(layout, index)                  which of the shard's bytes are items of which size
    wire = encode(Codec.GAPS, old, new, segments)          a frame: the shortest of patch, anchor and raw
    decode(wire, old, out, segments)                       total on hostile bytes; `out` is the new shard

    module      what it covers
    frames      a frame, the choice among codecs
    segments    what is where in a shard
    gaps        gaps and small differences: the usual patch
    classes     gaps that count only items of like exponent: half as long, for thin links
    planes      byte planes: anchors, and patches in which everything changed
    streams     the byte streams all of these are made of; zstd
    compiled    when inner loops are compiled
    kernels     the compiled loops

An optimiser's step at usual learning rates changes a half to three per cent of bfloat16 weights, most by one place
(field notes; PULSE, arXiv 2602.03839). Nothing here knows about publications, hashes or the network.
"""

from shardcast.codecs.frames import Codec, decode, encode, needs_old
from shardcast.codecs.segments import Segment, segments_of

__all__ = ["Codec", "Segment", "decode", "encode", "needs_old", "segments_of"]
