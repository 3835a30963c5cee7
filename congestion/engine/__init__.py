"""The packet engine: windowed, data-oriented, exact to the picosecond; flows by the rules of ns-3's HPCC simulator.

Time goes in windows of the smallest link delay, so what one node sends in a window reaches no other in it, and nodes
can be run one after another (`run`), each on its own wires in and ports out (`switch`, `host`). A wire is a list a
directed link, written by its sender and read by its receiver up to the window's end; packets are put there when their
transmission begins, so arrivals are in order. Idle time is jumped over by each node's next time. The state is a few
integer tables (`tables`); drawn numbers are hashes, so no order of drawing matters.

Order of events: time; then arrivals; then starts of flows; then ports and NICs, by port. In ns-3 the order within a
moment is that of scheduling: arrivals are ordered by as much of it as their wires show (`switch`), then by in-link.

What the kernels are compiled for is in the type of `features`: most runs know nothing of losses, flaps, timers, PFC
watchdogs and several paths a flow (`plain`), others have all of them (`extras`), and those with classes of traffic
queues for each (`classes`). Each is compiled when first needed and kept.

Where the time goes: an array that is looked at row by row costs its reference count, which `jit` omits; the tables
are handed from function to function by value, hence inlined. Not covered: more than one cable a host, a limit to the
buffer of one class without PFC (but `drop_tail`), a PFC watchdog with classes of traffic.
"""
