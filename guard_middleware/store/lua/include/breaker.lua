-- What moves a breaker: operators, and how calls end.

-- A new generation: what is not said is as in a new breaker.
local function move_breaker(endpoint, open_until_ms, trips, ramp)
  local one = endpoint_of(endpoint)
  one.generation = one.generation + 1
  one.open_until_ms, one.trips, one.ramp = open_until_ms, trips, ramp
  one.fails, one.probe, one.probe_until_ms = 0, "", 0
  changed_endpoints[endpoint] = true
end

-- The ramp ends at the full limit, and only then is the escalation forgotten.
local function ramped(one)
  if one.ramp ~= -1 and 1 + one.ramp >= ceiling_of(one) then
    one.ramp, one.trips = -1, 0
  end
end

local function trip(endpoint, one, retry_after_ms)
  local trips = one.trips + 1
  local cooldown = floor(min(one.base_cooldown_ms * one.backoff_factor ^ min(trips - 1, 64), one.max_cooldown_ms))
  local pause = max(cooldown, min(retry_after_ms, rules.retry_after_cap_ms))
  move_breaker(endpoint, max(one.open_until_ms, now + pause), trips, -1)
end

--[[
  Apply how a call ended (I7).
  Returns whether an overload is to be counted against the message that made the call.
]]
local function settle(endpoint, outcome, lease_id, lease, retry_after_ms)
  local one = endpoint_of(endpoint)
  if not one.breaker or lease.generation ~= one.generation then return false end
  local well = outcome == "success" or outcome == "benign"
  if one.open_until_ms == 0 then
    local first = one.fails == 0
    if well and (not first or one.ramp ~= -1) then
      one.fails = 0
      if one.ramp ~= -1 then one.ramp = one.ramp + lease.cost end
      ramped(one)
      changed_endpoints[endpoint] = true
    elseif outcome == "overload" then
      one.fails = one.fails + 1
      changed_endpoints[endpoint] = true
      if one.fails >= one.fail_threshold then trip(endpoint, one, retry_after_ms) end
      return first
    end
    return false
  end
  if lease_id ~= one.probe then return false end
  if well then
    move_breaker(endpoint, 0, one.trips, 0)
    ramped(one)
  elseif outcome == "overload" then
    trip(endpoint, one, retry_after_ms)
    return true
  else
    one.probe, one.probe_until_ms = "", 0
    changed_endpoints[endpoint] = true
  end
  return false
end
