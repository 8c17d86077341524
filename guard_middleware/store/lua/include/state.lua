--[[
  The clock and the formats of what is kept. Every script begins with this.
  A script runs from its first line each time: each command to the server, each field, table and function that is made
  shows in what a permit costs. That is why the common case of `admit` and `finish` stands alone, before all other
  includes; why records are numbers (as doubles) that are followed by text; and why those that change most come first.
]]

local call = redis.call
local floor, min, max, huge = math.floor, math.min, math.max, math.huge
local pack_numbers, numbers = struct.pack, struct.unpack

local root = KEYS[1]
local STATE, LEASE, UNITS = root .. "state", root .. "lease:", root .. "units:"
local BACKGROUND = 3                    -- the last rank: it may not touch the reserve

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

-- I6: one clock, the server's; it stands still until the end of the script.
local now = tonumber(ARGV[1])
local injected = now ~= nil
if not injected then
  local time = call("TIME")
  now = time[1] * 1000 + floor(time[2] / 1000)
end
