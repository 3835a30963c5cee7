"""Layout of the keys of one run in Redis, and the Lua scripts that change them; each script is atomic.

All keys of a run begin with its namespace, `netlayer:{RUN}:`. A key NAME of the store is the list `k:NAME` with its
value as the only element, so that the server can block any number of clients until it exists (BLMOVE of the list onto
itself). A queue NAME is the list `q:NAME`; while it has elements and no value has the same name, `k:NAME` has one
empty element, so that `check` and `wait` see the queue. `keys` and `queues` are the sets of names, `once` the last
answer to each connection, `ranks` and `left` the members that joined and left, `epoch` a random word: if it is gone,
so is the data.

A writing script first gets the name of the connection and a serial number. If it has seen the serial already, it
returns the answer stored in `once` and changes nothing, so that a request repeated after a lost answer runs once.

Redis may evict keys under `maxmemory`. Joining refuses a server with such a policy (`netlayer.store.redis_run`). If
keys are evicted nevertheless, a script that meets a name whose set and list disagree, or a run without its epoch,
answers with the error LOST.
"""

from __future__ import annotations

from netlayer.store.redis_link import Script

__all__ = [
    "ADD",
    "APPEND",
    "CHECK",
    "CLEAR",
    "COMPARE_SET",
    "DELETE",
    "EVICTS",
    "HAS_LEFT",
    "JOIN",
    "LEAVE",
    "LOST",
    "POP",
    "PUSH",
    "SET",
    "TIDY",
    "queue",
    "slot",
]


LOST = "LOSTDATA"  # prefix of a script's error for a key whose data the server has evicted


def slot(namespace: bytes, name: bytes) -> bytes:
    """Return the Redis key of the list that holds the value of `name`."""
    return namespace + b"k:" + name


def queue(namespace: bytes, name: bytes) -> bytes:
    """Return the Redis key of the list that holds the elements of queue `name`."""
    return namespace + b"q:" + name


_KEYS = """
local ns = KEYS[1]
local function slot(name) return ns .. 'k:' .. name end
local function queue(name) return ns .. 'q:' .. name end

-- A name is lost if its set and its list disagree: the server has dropped one of them, for example by eviction.
local function refuse_lost(name)
  if redis.call('EXISTS', ns .. 'epoch') == 0 then return redis.error_reply('LOSTDATA epoch') end
  local listed, held = redis.call('SISMEMBER', ns .. 'keys', name), redis.call('EXISTS', slot(name))
  if listed ~= held and (listed == 1 or redis.call('SISMEMBER', ns .. 'queues', name) == 0) then
    return redis.error_reply('LOSTDATA ' .. name)
  end
end

local function read(name)
  if redis.call('SISMEMBER', ns .. 'keys', name) == 1 then return redis.call('LINDEX', slot(name), 0) end
end

local function write(name, value)
  redis.call('SADD', ns .. 'keys', name)
  if redis.call('EXISTS', slot(name)) == 1 then
    redis.call('LSET', slot(name), 0, value)
  else
    redis.call('RPUSH', slot(name), value)
  end
end

local function tidy(name)
  if redis.call('EXISTS', queue(name)) == 1 then return end
  redis.call('SREM', ns .. 'queues', name)
  if redis.call('SISMEMBER', ns .. 'keys', name) == 0 then redis.call('DEL', slot(name)) end
end
"""

_ONCE = """
local client, serial = ARGV[1], ARGV[2]
local last = redis.call('HGET', ns .. 'once', client)
if last then
  local space = string.find(last, ' ', 1, true)
  if tonumber(string.sub(last, 1, space - 1)) >= tonumber(serial) then return string.sub(last, space + 1) end
end
-- Checked after `once`: a repeated request from before the loss still gets its answer.
local refusal = ARGV[3] and refuse_lost(ARGV[3])
if refusal then return refusal end
local function done(answer)
  redis.call('HSET', ns .. 'once', client, serial .. ' ' .. answer)
  return answer
end
"""

# ARGV: name, value, name, value, ...
SET = Script(f"""{_KEYS}{_ONCE}
for i = 5, #ARGV, 2 do
  refusal = refuse_lost(ARGV[i])
  if refusal then return refusal end
end
for i = 3, #ARGV, 2 do write(ARGV[i], ARGV[i + 1]) end
return done('')
""")

# ARGV: name, amount. Returns '=' and the sum, or '!' and the reason why there is none. Reads numbers as TCPStore does
# (C's stoll). Redis computes the sum, because Lua's numbers are exact only to 2^53.
ADD = Script(f"""{_KEYS}{_ONCE}
local sign, digits = string.match(read(ARGV[3]) or '0', '^%s*([+-]?)0*(%d+)')
if not digits then return done('!its value is not a number') end
if sign == '+' or digits == '0' then sign = '' end
local scratch = ns .. 'scratch'
redis.call('SET', scratch, sign .. digits)
local sum = redis.pcall('INCRBY', scratch, ARGV[4])
if type(sum) == 'number' then sum = redis.call('GET', scratch) else sum = nil end
redis.call('DEL', scratch)
if not sum then return done('!its value or the sum is beyond 64 bits') end
write(ARGV[3], sum)
return done('=' .. sum)
""")

# ARGV: name, value
APPEND = Script(f"""{_KEYS}{_ONCE}
write(ARGV[3], (read(ARGV[3]) or '') .. ARGV[4])
return done('')
""")

# ARGV: name, expected, desired. Returns the value afterwards; `expected` if the key is missing but should have a value.
COMPARE_SET = Script(f"""{_KEYS}{_ONCE}
local held = read(ARGV[3])
if (held or '') ~= ARGV[4] then return done(held or ARGV[4]) end
write(ARGV[3], ARGV[5])
return done(ARGV[5])
""")

# ARGV: name. Returns '1' if the key existed.
DELETE = Script(f"""{_KEYS}{_ONCE}
if redis.call('SREM', ns .. 'keys', ARGV[3]) == 0 then return done('0') end
if redis.call('EXISTS', queue(ARGV[3])) == 1 then
  redis.call('LSET', slot(ARGV[3]), 0, '')
else
  redis.call('DEL', slot(ARGV[3]))
end
return done('1')
""")

# ARGV: name, value
PUSH = Script(f"""{_KEYS}{_ONCE}
redis.call('RPUSH', queue(ARGV[3]), ARGV[4])
redis.call('SADD', ns .. 'queues', ARGV[3])
if redis.call('EXISTS', slot(ARGV[3])) == 0 then redis.call('RPUSH', slot(ARGV[3]), '') end
return done('')
""")

# ARGV: name. Returns '=' and the first element, or '!' if there is none.
POP = Script(f"""{_KEYS}{_ONCE}
local value = redis.call('LPOP', queue(ARGV[3]))
if not value then return done('!') end
tidy(ARGV[3])
return done('=' .. value)
""")

# ARGV: names. Returns 1 if all have a value or are queues with elements.
CHECK = Script(f"""{_KEYS}
local all = 1
for _, name in ipairs(ARGV) do
  local refusal = refuse_lost(name)
  if refusal then return refusal end
  all = math.min(all, redis.call('EXISTS', slot(name)))
end
return all
""")

# ARGV: name. Cleans up after a BLPOP of the queue.
TIDY = Script(f"""{_KEYS}
tidy(ARGV[1])
return 1
""")

# ARGV: member, token, new epoch. Returns the epoch of the run; nil if another process is that member; HAS_LEFT if that
# member has left and others of its run have not yet. Fails with `EVICTS policy limit` if the server would evict keys
# under memory pressure; checked here so that joining remains one request a rank. `volatile-*` policies never evict our
# keys, since these have no expiry.
HAS_LEFT = b"left"
EVICTS = "EVICTS"
JOIN = Script("""
local ns = KEYS[1]
local memory = redis.pcall('INFO', 'memory')
if type(memory) == 'string' then  -- a table (error) if the user may not call INFO
  local policy, limit = memory:match('maxmemory_policy:(%S+)'), memory:match('maxmemory:(%d+)')
  if policy and policy:sub(1, 8) == 'allkeys-' and limit ~= '0' then
    return redis.error_reply('EVICTS ' .. policy .. ' ' .. limit)
  end
end
if redis.call('HSETNX', ns .. 'ranks', ARGV[1], ARGV[2]) == 0
    and redis.call('HGET', ns .. 'ranks', ARGV[1]) ~= ARGV[2] then
  return redis.call('SISMEMBER', ns .. 'left', ARGV[1]) == 1 and 'left' or nil
end
redis.call('SET', ns .. 'epoch', ARGV[3], 'NX')
return redis.call('GET', ns .. 'epoch')
""")

# ARGV: member, epoch, world size or 0. Returns 1 if this was the last member: all who joined, and at least as many as
# the world size, have left.
LEAVE = Script("""
local ns = KEYS[1]
if redis.call('GET', ns .. 'epoch') ~= ARGV[2] then return 0 end
redis.call('SADD', ns .. 'left', ARGV[1])
local expected = math.max(tonumber(ARGV[3]), redis.call('HLEN', ns .. 'ranks'))
return redis.call('SCARD', ns .. 'left') >= expected and 1 or 0
""")

# Removes a part of the run, small enough not to block other runs. Returns the number of names removed, 0 at the end.
CLEAR = Script(f"""{_KEYS}
local names, queues = redis.call('SPOP', ns .. 'keys', 1000), redis.call('SPOP', ns .. 'queues', 1000)
for _, name in ipairs(names) do redis.call('UNLINK', slot(name)) end
for _, name in ipairs(queues) do redis.call('UNLINK', slot(name), queue(name)) end
if #names + #queues == 0 then
  redis.call('UNLINK', ns .. 'epoch', ns .. 'ranks', ns .. 'left', ns .. 'once', ns .. 'scratch')
end
return #names + #queues
""")
