--[[
  The call that is carried out, and the formats of what is kept. Everything else builds on this.
  The library is run once, when the server loads it; from then on its functions are called, so what belongs to one call
  is set anew by `start` and `prefetch`. Records are numbers (as doubles) that are followed by text, and those that
  change most come first, because reading and writing them is most of what a permit costs.
]]

local call, floor, min, max, huge, pack_numbers, numbers, pack, decode -- a server gives them only once it has loaded
local BACKGROUND = 3                    -- the last rank: it may not touch the reserve
local STAMPS = 10                       -- the time of the last command is noted so often in a heartbeat: it is a write

--[[
  last_run_ms, due_ms, places, takes, epoch_until_ms, away_ms, held_at_ms; the eight rules, in the order of `configure`;
  then the epoch
]]
local CLOCK = ">ddddddddddddddd"
--[[
  mean_ms, background_at_ms, override (-1 for none), paused, generation, open_until_ms, trips, fails, probe_until_ms,
  ramp; named, ceiling, floor, reserve (-1 for the fraction), breaker, fail_threshold, base_cooldown_ms,
  max_cooldown_ms, backoff_factor, budget (-1 for none), floors of the others of the group; then the probe
]]
local ENDPOINT = ">ddddddddddddddddddddd"
-- idle, held
local PROCESS = ">dd"
-- rank, cost, place, deadline_ms, started_at_ms, generation, hold; then texts with \31 between: see `write_lease`
local LEASE_NUMBERS = ">ddddddd"
-- status, until_ms, away_ms, retry_after_ms; then the reason, and \31 and a lease id for each message handed over
local TOMBSTONE = ">dddd"
-- rank, cost, place, overloads, denials, overloaded, deadline_ms; then the process
local PARKED_NUMBERS = ">ddddddd"

-- The call: its keys and arguments, its clock, and where its guard's keys begin.
local KEYS, ARGV, now, injected, root, STATE, LEASE, UNITS, NESTED

-- Begin a call. I6: there is one clock, the server's, and it stands still until the call is over.
local function start(keys, args)
  if not call then
    call, floor, min, max, huge = redis.call, math.floor, math.min, math.max, math.huge
    pack_numbers, numbers, pack, decode = struct.pack, struct.unpack, cmsgpack.pack, cmsgpack.unpack
  end
  KEYS, ARGV = keys, args
  root = keys[1]
  STATE, LEASE, UNITS, NESTED = root .. "state", root .. "lease:", root .. "units:", root .. "nested"
  now = tonumber(args[1])
  injected = now ~= nil
  if not injected then
    local time = call("TIME")
    now = time[1] * 1000 + floor(time[2] / 1000)
  end
end
