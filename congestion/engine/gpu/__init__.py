"""The packet engine on a GPU: the rules of `switch` and `host`, the same laws, another division of the work.

A warp runs a switch, a thread a host (`step`); every window ends with one barrier of the whole grid, at which the next
window's begin is known (`device`). What a thread of the CPU's engine has to itself would here be shared by tens of
thousands, so lists differ (`lists`): a wire is a ring as long as physics lets it fill, a queue takes chunks off one
ring of free ones. All else is the same function compiled twice, its calls of lists exchanged (`graft`). Numbers are the
same bits: integers added by atomics in any order, floats without fused multiply-add. `loops` runs these steps on the
CPU, lane after lane in either order, so that they can be tested where there is no GPU.
"""
