"""The letters at the end of array names: one letter, one axis, in order.

    T tokens in the step       L layers                 V vocabulary
    R requests, or rows        D model width            B blocks in the pool
    C context length           H query heads            S slots in a block
    K draft tokens             G key/value heads        N query tiles
    F feed-forward width       E head size              M rows of a tile (tile queries x heads of a group)

So `query_THE` is (tokens, query heads, head size) and `keys_LBSGE` the whole key cache. Scalars and lists have none.
"""
