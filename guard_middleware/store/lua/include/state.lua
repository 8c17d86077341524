--[[
  The clock, and the small facts of the guard, which stand in one hash: read through, and written back once at the end.
  A script runs from its first line each time, so that every command to the server, every field and every function that
  is made shows in what a permit costs. That is why the common case of `admit` and `finish` stands before most includes,
  and why records are numbers first (as doubles), then text.
]]

local call = redis.call
local floor, min, max, huge = math.floor, math.min, math.max, math.huge
local pack, decode = cmsgpack.pack, cmsgpack.unpack
local pack_numbers, numbers = struct.pack, struct.unpack

local root = KEYS[1]
local STATE = root .. "state"
local BACKGROUND = 3                    -- the last rank: it may not touch the reserve
local CHUNK = 100                       -- never unpack more than this

-- I6: one clock, the server's; it stands still until the end of the script.
local now = tonumber(ARGV[1])
local injected = now ~= nil
if not injected then
  local time = call("TIME")
  now = time[1] * 1000 + floor(time[2] / 1000)
end

local facts, changed = {}, {}           -- field -> as stored, false if absent; field -> true
local processes, endpoints, specs = {}, {}, {}
local changed_processes, changed_endpoints = {}, {}
local clock, rules

local function fact(field)
  local value = facts[field]
  if value == nil then
    value = call("HGET", STATE, field)
    facts[field] = value
  end
  return value
end

-- Remember a fact; false removes it.
local function set_fact(field, value)
  facts[field] = value
  changed[field] = true
end

-- Read fields, "clock" and "rules" among them, which are then there as tables; the rules only if there are any.
local function prefetch(fields)
  local values = call("HMGET", STATE, unpack(fields))
  for index = 1, #fields do facts[fields[index]] = values[index] end
  if facts.clock then
    local last_run, due, places, takes, epoch_until, away, held_at = numbers(">ddddddd", facts.clock)
    clock = {
      last_run_ms = last_run, due_ms = due, places = places, takes = takes, epoch_until_ms = epoch_until,
      away_ms = away, held_at_ms = held_at,
    }
  else
    clock = {
      last_run_ms = now, due_ms = huge, places = 0, takes = 0, epoch_until_ms = 0, away_ms = 0, held_at_ms = huge,
    }
  end
  if facts.rules then
    local lease, heartbeat, hold, ageing, overloads, fraction, probe, cap = numbers(">dddddddd", facts.rules)
    rules = {
      lease_ms = lease, heartbeat_ms = heartbeat, hold_ms = hold, ageing_ms = ageing, max_overloads = overloads,
      reserve_fraction = fraction, probe_deadline_ms = probe, retry_after_cap_ms = cap,
    }
  end
end

-- What a process reported, and whether a unit is kept for it: { idle, held }; false for an unknown one.
local function process_of(process)
  local known = processes[process]
  if known == nil then
    local packed = fact("process:" .. process)
    known = false
    if packed then
      local idle, held = numbers(">dd", packed)
      known = { idle = idle, held = held == 1 }
    end
    processes[process] = known
  end
  return known
end

local function set_idle(process, idle)
  local known = process_of(process)
  if known and known.idle ~= idle then
    known.idle = idle
    changed_processes[process] = true
  end
end

--[[
  How an endpoint is: what operators want of it, its breaker, and what was measured. Whoever changes the table says so
  in `changed_endpoints`.
]]
local function endpoint_of(endpoint)
  local known = endpoints[endpoint]
  if not known then
    local packed = fact("endpoint:" .. endpoint)
    if packed then
      local override, paused, generation, open_until, trips, fails, probe_until, ramp, mean, background, rest =
        numbers(">dddddddddd", packed)
      known = {
        override = override, paused = paused == 1, generation = generation, open_until_ms = open_until, trips = trips,
        fails = fails, probe_until_ms = probe_until, ramp = ramp, mean_ms = mean, background_at_ms = background,
        probe = packed:sub(rest),
      }
    else
      known = {
        override = -1, paused = false, generation = 0, open_until_ms = 0, trips = 0, fails = 0, probe_until_ms = 0,
        ramp = -1, mean_ms = 0, background_at_ms = 0, probe = "",
      }
    end
    endpoints[endpoint] = known
  end
  return known
end

-- The configuration of an endpoint that applies, false if nobody names it; `texts_of` has the rest of it.
local function spec_of(endpoint)
  local known = specs[endpoint]
  if known == nil then
    local packed = fact("spec:" .. endpoint)
    known = false
    if packed then
      local ceiling, floor_of, reserve, breaker, threshold, base, longest, factor, budget, floors, rest =
        numbers(">dddddddddd", packed)
      known = {
        ceiling = ceiling, floor = floor_of, reserve = reserve, breaker = breaker == 1, fail_threshold = threshold,
        base_cooldown_ms = base, max_cooldown_ms = longest, backoff_factor = factor, budget = budget, floors = floors,
        texts = packed:sub(rest),
      }
    end
    specs[endpoint] = known
  end
  return known
end

-- Of a configuration: { group, fallback, others (of the group, with the unused part of its budget) }.
local function texts_of(spec)
  if type(spec.texts) == "string" then spec.texts = decode(spec.texts) end
  return spec.texts
end

-- Write back what has changed; the clock always has.
local function flush()
  local written, removed = {
    "clock", pack_numbers(">ddddddd", clock.last_run_ms, clock.due_ms, clock.places, clock.takes, clock.epoch_until_ms,
      clock.away_ms, clock.held_at_ms),
  }, nil
  for process in pairs(changed_processes) do
    local known = processes[process]
    written[#written + 1] = "process:" .. process
    written[#written + 1] = pack_numbers(">dd", known.idle, known.held and 1 or 0)
  end
  for endpoint in pairs(changed_endpoints) do
    local one = endpoints[endpoint]
    written[#written + 1] = "endpoint:" .. endpoint
    written[#written + 1] = pack_numbers(">dddddddddd", one.override, one.paused and 1 or 0, one.generation,
      one.open_until_ms, one.trips, one.fails, one.probe_until_ms, one.ramp, one.mean_ms, one.background_at_ms)
      .. one.probe
  end
  for field in pairs(changed) do
    local value = facts[field]
    if value then
      written[#written + 1] = field
      written[#written + 1] = value
    else
      removed = removed or {}
      removed[#removed + 1] = field
    end
  end
  for index = 1, removed and #removed or 0 do call("HDEL", STATE, removed[index]) end
  for first = 1, #written, CHUNK do
    call("HSET", STATE, unpack(written, first, min(#written, first + CHUNK - 1)))
  end
end
