--[[
  The admission rule over one endpoint and its GPU group: what `core/admission.py` says, and the choice between an
  endpoint and its fallback.
]]

-- Units of the present generation, of which the ramp counts.
local function present(endpoint, generation)
  local units = 0
  for _, unit in ipairs(call("ZRANGEBYSCORE", UNITS .. endpoint, now + 1, "+inf")) do
    local lease = not unit:find("\31", 1, true) and lease_of(unit)
    if lease and lease.generation == generation then units = units + lease.cost end
  end
  return units
end

-- Whether the probe's role is taken, or a unit is held for the probe.
local function probe_live(endpoint)
  local one, units = endpoint_of(endpoint), UNITS .. endpoint
  if one.probe ~= "" and now < one.probe_until_ms and tonumber(call("ZSCORE", units, one.probe) or 0) > now then
    return true
  end
  for _, unit in ipairs(call("ZRANGEBYSCORE", units, now + 1, "+inf")) do
    if unit:sub(1, #HOLD) == HOLD then return true end
  end
  return false
end

-- Why this endpoint would not admit a call now, or nil; and whether only the GPU group stands against it.
local function against(endpoint, spec, rank, cost, aged)
  local one = endpoint_of(endpoint)
  if one.paused then return "paused", false end
  local phase = phase_at(endpoint, spec)
  if phase == "open" then return "breaker_open", false end
  if phase == "half_open" and probe_live(endpoint) then return "probing", false end
  local background = rank >= BACKGROUND and not aged and phase == "closed"
  if phase ~= "closed" or not spec.breaker or one.ramp == -1 then
    return no_room(endpoint, spec, cost, background)
  end
  return no_room(endpoint, spec, cost, background, present(endpoint, one.generation), 1 + one.ramp)
end

--[[
  Whether no release could let such a call go: it costs more than what is in force leaves to its rank at best. Only an
  operator, a new configuration or its ageing turn can. Until then it holds nobody else up.
]]
local function hopeless(endpoint, spec, rank, cost, aged)
  local background = rank >= BACKGROUND and not aged and phase_at(endpoint, spec) == "closed"
  local ceiling, budget = ceiling_of(endpoint, spec), spec.budget
  if background then ceiling = ceiling - reserve_of(ceiling, spec.reserve) end
  if cost > ceiling then return true end
  if budget < 0 then return false end
  if background then budget = budget - reserve_of(budget, -1) end
  return cost > min(budget, spec.budget - spec.floors)
end

--[[
  Choose the endpoint for a call: its own, or the fallback while its own breaker is not closed.
  Returns the endpoint; why it would not admit the call, or nil; and whether only the GPU group stands against it.
]]
local function place_call(home, rank, cost, aged)
  local spec = spec_of(home)
  if not spec then return home, "paused", false end
  local reason, by_group = against(home, spec, rank, cost, aged)
  if not reason or endpoint_of(home).paused or phase_at(home, spec) == "closed" then return home, reason, by_group end
  local fallback = texts_of(spec).fallback
  local there = fallback ~= "" and spec_of(fallback)
  if not there then return home, reason, by_group end
  return fallback, against(fallback, there, rank, cost, aged)
end

-- Whether no release could let a waiter of `home` go, there or at the endpoint chosen instead.
local function stuck(home, endpoint, rank, cost, aged)
  local own, there = spec_of(home), spec_of(endpoint)
  return own and hopeless(home, own, rank, cost, aged) or there and hopeless(endpoint, there, rank, cost, aged)
end

-- How often a permit of this endpoint becomes free: mean call over limit.
local function step_ms(endpoint)
  local limit, spec = 1, spec_of(endpoint)
  if spec then
    local ramp = endpoint_of(endpoint).ramp
    limit = ceiling_of(endpoint, spec)
    if ramp ~= -1 and spec.breaker then limit = min(limit, 1 + ramp) end
  end
  return max(1, floor(mean_of(endpoint) / max(1, limit)))
end

-- How long a delay lasts at least, as far as is known.
local function wait_ms(endpoint, reason)
  local one = endpoint_of(endpoint)
  if reason == "breaker_open" then return one.open_until_ms - now end
  if reason == "probing" then return max(1, min(mean_of(endpoint), one.probe_until_ms - now)) end
  return rules.heartbeat_ms
end
