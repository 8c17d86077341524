-- The circuit breaker of one endpoint, in the record `endpoint:<endpoint>`: what `core/breaker.py` says.

local FIRST_MEAN_MS = 1000              -- the mean length of a call before the first one has ended

-- The state of the breaker of an endpoint; one that is switched off counts as closed.
local function phase_at(endpoint, spec)
  local one = endpoint_of(endpoint)
  if one.open_until_ms == 0 or not spec.breaker then return "closed" end
  return now < one.open_until_ms and "open" or "half_open"
end

local function mean_of(endpoint)
  local mean_ms = endpoint_of(endpoint).mean_ms
  return mean_ms > 0 and mean_ms or FIRST_MEAN_MS
end

-- A new generation: what is not said is as in a new breaker.
local function move_breaker(endpoint, open_until_ms, trips, ramp)
  local one = endpoint_of(endpoint)
  one.generation = one.generation + 1
  one.open_until_ms, one.trips, one.ramp = open_until_ms, trips, ramp
  one.fails, one.probe, one.probe_until_ms = 0, "", 0
  changed_endpoints[endpoint] = true
end

--[[
  Give the probe's role to a lease of an endpoint, if it is half-open; a role that had passed on ends its generation.
  Returns whether it is the probe.
]]
local function give_role(id, endpoint)
  if phase_at(endpoint, spec_of(endpoint)) ~= "half_open" then return false end
  local one = endpoint_of(endpoint)
  if one.probe ~= "" then one.generation = one.generation + 1 end
  one.probe = id
  one.probe_until_ms = now + max(rules.probe_deadline_ms, 4 * mean_of(endpoint))
  changed_endpoints[endpoint] = true
  return true
end
