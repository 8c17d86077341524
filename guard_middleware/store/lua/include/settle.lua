-- How the end of a call moves the breaker: what `core/breaker.py` says.

--[[
  Apply how a call ended (I7).
  Returns whether an overload is to be counted against the message that made the call.
]]
local function settle(endpoint, spec, outcome, lease_id, lease, retry_after_ms, full_limit)
  local before_it = breaker_of(endpoint)
  if not spec.breaker or lease.generation ~= before_it.generation then return false end
  local well = outcome == "success" or outcome == "benign"
  local closed = before_it.open_until_ms == 0
  if closed and well and before_it.fails == 0 and before_it.ramp == -1 then return false end
  if not well and outcome ~= "overload" and (closed or lease_id ~= before_it.probe) then return false end

  local after = {}
  for name, value in pairs(before_it) do after[name] = value end

  local function trip()
    local trips = before_it.trips + 1
    local cooldown = floor(min(spec.base_cooldown_ms * spec.backoff_factor ^ min(trips - 1, 64), spec.max_cooldown_ms))
    local pause = max(cooldown, min(retry_after_ms, rules.retry_after_cap_ms))
    after = {
      generation = before_it.generation + 1, trips = trips, open_until_ms = max(before_it.open_until_ms, now + pause),
    }
  end

  -- The ramp ends at the full limit, and only then is the escalation forgotten.
  local function ramped()
    if after.ramp ~= -1 and 1 + after.ramp >= full_limit then
      after.ramp = -1
      after.trips = 0
    end
  end

  local counted = false
  if closed then
    if well then
      after.fails = 0
      if after.ramp ~= -1 then after.ramp = after.ramp + lease.cost end
      ramped()
    else
      counted = before_it.fails == 0
      after.fails = before_it.fails + 1
      if after.fails >= spec.fail_threshold then trip() end
    end
  elseif lease_id ~= before_it.probe then
    return false
  elseif well then
    after = { generation = before_it.generation + 1, trips = before_it.trips, ramp = 0 }
    ramped()
  elseif outcome == "overload" then
    counted = true
    trip()
  else
    after.probe = ""
    after.probe_until_ms = 0
  end
  set_breaker(endpoint, after)
  return counted
end
