-- How the end of a call moves the breaker: what `core/breaker.py` says.

--[[
  Apply how a call ended (I7).
  Returns whether an overload is to be counted against the message that made the call.
]]
local function settle(endpoint, spec, outcome, lease_id, lease, retry_after_ms, full_limit)
  local one = endpoint_of(endpoint)
  if not spec.breaker or lease.generation ~= one.generation then return false end
  local well = outcome == "success" or outcome == "benign"

  -- The ramp ends at the full limit, and only then is the escalation forgotten.
  local function ramped()
    if one.ramp ~= -1 and 1 + one.ramp >= full_limit then
      one.ramp, one.trips = -1, 0
    end
  end

  local function trip()
    local trips = one.trips + 1
    local cooldown = floor(min(spec.base_cooldown_ms * spec.backoff_factor ^ min(trips - 1, 64), spec.max_cooldown_ms))
    local pause = max(cooldown, min(retry_after_ms, rules.retry_after_cap_ms))
    move_breaker(endpoint, max(one.open_until_ms, now + pause), trips, -1)
  end

  if one.open_until_ms == 0 then
    if well and (one.fails > 0 or one.ramp ~= -1) then
      one.fails = 0
      if one.ramp ~= -1 then one.ramp = one.ramp + lease.cost end
      ramped()
      changed_endpoints[endpoint] = true
    elseif outcome == "overload" then
      local first = one.fails == 0
      if one.fails + 1 >= spec.fail_threshold then
        trip()
      else
        one.fails = one.fails + 1
        changed_endpoints[endpoint] = true
      end
      return first
    end
    return false
  end
  if lease_id ~= one.probe then return false end
  if well then
    move_breaker(endpoint, 0, one.trips, 0)
    ramped()
  elseif outcome == "overload" then
    trip()
    return true
  else
    one.probe, one.probe_until_ms = "", 0
    changed_endpoints[endpoint] = true
  end
  return false
end
