-- The circuit breaker of one endpoint: what `core/breaker.py` says, over the record `breaker:<endpoint>`.

local CLOSED = {
  generation = 0, open_until_ms = 0, trips = 0, fails = 0, probe = "", probe_until_ms = 0, ramp = -1,
}

-- Missing state means closed. The record is never changed in place: see `set_breaker`.
local function breaker_of(endpoint)
  return record("breaker:" .. endpoint) or CLOSED
end

local function phase_of(breaker)
  if breaker.open_until_ms == 0 then return "closed" end
  if now < breaker.open_until_ms then return "open" end
  return "half_open"
end

-- Write a breaker: the fields that are named, the rest as in a new one.
local function set_breaker(endpoint, fields)
  for name, value in pairs(CLOSED) do
    if fields[name] == nil then fields[name] = value end
  end
  set_record("breaker:" .. endpoint, fields)
end

--[[
  Give the probe's role to a lease of an endpoint, if it is half-open; a role that had passed on ends its generation.
  Returns the generation of the lease, and whether it is the probe.
]]
local function give_role(id, endpoint, hold)
  local breaker = breaker_of(endpoint)
  if breaker.open_until_ms == 0 or hold or phase_of(breaker) ~= "half_open"
    or not record("spec:" .. endpoint).breaker then
    return breaker.generation, false
  end
  local mean_ms = tonumber(fact("mean:" .. endpoint) or 0)
  if mean_ms == 0 then mean_ms = 1000 end
  local generation = breaker.generation + (breaker.probe ~= "" and 1 or 0)
  set_breaker(endpoint, {
    generation = generation, open_until_ms = breaker.open_until_ms, trips = breaker.trips, fails = breaker.fails,
    ramp = breaker.ramp, probe = id, probe_until_ms = now + max(rules.probe_deadline_ms, 4 * mean_ms),
  })
  return generation, true
end
