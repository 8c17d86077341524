--[[
  The small facts of the guard, which stand in one hash: read through, and written back once at the end.
]]

local CHUNK = 100                       -- never unpack more than this
local RANK = 2 ^ 50                     -- score in a line = rank * RANK + place, exact in a double
local HOLD = "hold:"

local facts, tables, changed            -- by field: as stored (false if absent), as a table, true
local processes, endpoints, changed_processes, changed_endpoints
local clock, rules, epoch
local counted_units                     -- endpoint -> units in flight, once they are counted
local split, windows, consumers_of      -- line -> its parts, its first waiters; queue -> who consumes it
local aged_of                           -- endpoint -> its aged background waiter, until a line or a start changes that
local freed                             -- whether there is something that a waiter may have now

local function default_rules()
  return {
    lease_ms = 15000, heartbeat_ms = 2000, hold_ms = 50, ageing_ms = 60000, max_overloads = 3, reserve_fraction = 0.34,
    probe_deadline_ms = 30000, retry_after_cap_ms = 600000,
  }
end

-- Read fields at once: first "clock", with the clock, the rules and the epoch, then any others. Nothing else is known.
local function prefetch(fields)
  facts, tables, changed = {}, {}, {}
  processes, endpoints, changed_processes, changed_endpoints = {}, {}, {}, {}
  counted_units, split, windows, consumers_of, aged_of, freed = {}, {}, {}, {}, {}, false
  local values = call("HMGET", STATE, unpack(fields))
  for index = 2, #fields do facts[fields[index]] = values[index] end
  local packed = values[1]
  if not packed then
    clock = {
      last_run_ms = now, due_ms = huge, places = 0, takes = 0, epoch_until_ms = 0, away_ms = 0, held_at_ms = huge,
    }
    rules, epoch = default_rules(), ""
    return
  end
  local last_run, due, places, takes, epoch_until, away, held_at, lease, heartbeat, hold, ageing, overloads, fraction,
    probe, cap, rest = numbers(CLOCK, packed)
  clock = {
    last_run_ms = last_run, due_ms = due, places = places, takes = takes, epoch_until_ms = epoch_until, away_ms = away,
    held_at_ms = held_at,
  }
  rules = {
    lease_ms = lease, heartbeat_ms = heartbeat, hold_ms = hold, ageing_ms = ageing, max_overloads = overloads,
    reserve_fraction = fraction, probe_deadline_ms = probe, retry_after_cap_ms = cap,
  }
  epoch = packed:sub(rest)
end

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

-- A fact that is a table, false if absent. Whoever changes the table sets it again.
local function record(field)
  local value = tables[field]
  if value == nil then
    local packed = fact(field)
    value = packed and decode(packed)
    tables[field] = value
  end
  return value
end

local function set_record(field, value)
  tables[field] = value
  set_fact(field, value and pack(value))
end

-- What a process reported, and whether a unit is kept for it: { idle, held }; false for an unknown one.
local function process_of(process)
  local known = processes[process]
  if known == nil then
    local packed = fact("process:" .. process)
    known = false
    if packed then
      local idle, held = numbers(PROCESS, packed)
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
  An endpoint: what was measured, what operators want of it, its breaker, and the configuration that applies, which is
  not there if nobody names it. Whoever changes the table says so in `changed_endpoints`.
]]
local function endpoint_of(endpoint)
  local known = endpoints[endpoint]
  if known then return known end
  local packed = fact("endpoint:" .. endpoint)
  if packed then
    local mean, background, override, paused, generation, open_until, trips, fails, probe_until, ramp, named, ceiling,
      floor_of, reserve, breaker, threshold, base, longest, factor, budget, floors, rest = numbers(ENDPOINT, packed)
    known = {
      mean_ms = mean, background_at_ms = background, override = override, paused = paused == 1,
      generation = generation, open_until_ms = open_until, trips = trips, fails = fails, probe_until_ms = probe_until,
      ramp = ramp, probe = packed:sub(rest), named = named == 1, ceiling = ceiling, floor = floor_of,
      reserve = reserve, breaker = breaker == 1, fail_threshold = threshold, base_cooldown_ms = base,
      max_cooldown_ms = longest, backoff_factor = factor, budget = budget, floors = floors,
    }
  else
    known = {
      mean_ms = 0, background_at_ms = 0, override = -1, paused = false, generation = 0, open_until_ms = 0, trips = 0,
      fails = 0, probe_until_ms = 0, ramp = -1, probe = "", named = false, ceiling = 0, floor = 0, reserve = -1,
      breaker = false, fail_threshold = 0, base_cooldown_ms = 0, max_cooldown_ms = 0, backoff_factor = 0, budget = -1,
      floors = 0,
    }
  end
  endpoints[endpoint] = known
  return known
end

-- The rest of an endpoint's configuration: { group, fallback, others (in the group: id, floor) }.
local function texts_of(endpoint)
  return record("texts:" .. endpoint) or { group = "", fallback = "", others = {} }
end

-- Write back what has changed; the clock always has.
local function flush()
  local written, removed = {
    "clock", pack_numbers(CLOCK, clock.last_run_ms, clock.due_ms, clock.places, clock.takes, clock.epoch_until_ms,
      clock.away_ms, clock.held_at_ms, rules.lease_ms, rules.heartbeat_ms, rules.hold_ms, rules.ageing_ms,
      rules.max_overloads, rules.reserve_fraction, rules.probe_deadline_ms, rules.retry_after_cap_ms) .. epoch,
  }, nil
  for process in pairs(changed_processes) do
    local known = processes[process]
    written[#written + 1] = "process:" .. process
    written[#written + 1] = pack_numbers(PROCESS, known.idle, known.held and 1 or 0)
  end
  for endpoint in pairs(changed_endpoints) do
    local one = endpoints[endpoint]
    written[#written + 1] = "endpoint:" .. endpoint
    written[#written + 1] = pack_numbers(ENDPOINT, one.mean_ms, one.background_at_ms, one.override,
      one.paused and 1 or 0, one.generation, one.open_until_ms, one.trips, one.fails, one.probe_until_ms, one.ramp,
      one.named and 1 or 0, one.ceiling, one.floor, one.reserve, one.breaker and 1 or 0, one.fail_threshold,
      one.base_cooldown_ms, one.max_cooldown_ms, one.backoff_factor, one.budget, one.floors) .. one.probe
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

-- Whether a string comes before another by its bytes; the `<` of the server follows its locale.
local function before(one, other)
  local length = min(#one, #other)
  for index = 1, length do
    local a, b = one:byte(index), other:byte(index)
    if a ~= b then return a < b end
  end
  return #one < #other
end

-- The order of waiters, each with its key, line and id.
local function in_order(one, other)
  if one.key ~= other.key then return one.key < other.key end
  return before(one.line .. "\31" .. one.waiter, other.line .. "\31" .. other.waiter)
end
