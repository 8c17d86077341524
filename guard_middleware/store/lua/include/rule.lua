--[[
  The admission rule over one endpoint and its GPU group (rules 1, 2 and 4 to 6 of DESIGN section 6, I1), and its
  breaker (I7): what `core/admission.py` and `core/breaker.py` say.
]]

local FIRST_MEAN_MS = 1000              -- the mean length of a call before the first one has ended

-- The state of an endpoint's breaker; one that is switched off counts as closed.
local function phase_of(one)
  if one.open_until_ms == 0 or not one.breaker then return "closed" end
  return now < one.open_until_ms and "open" or "half_open"
end

local function ceiling_of(one)
  return one.override >= 0 and one.override or one.ceiling
end

-- Units of a limit that background may not take; at least one is always left to it. `fixed` is -1 for the fraction.
local function reserve_of(limit, fixed)
  if limit <= 1 then return 0 end
  return min(fixed >= 0 and fixed or max(1, floor(rules.reserve_fraction * limit + 0.5)), limit - 1)
end

-- Rule 1: no state of this endpoint could ever admit such a call (an override or a ramp only delays).
local function never_fits(one, cost)
  return cost > one.ceiling or (one.budget >= 0 and cost > one.budget - one.floors)
end

--[[
  Whether such a call would fit if nothing else were in flight, with what is in force and the reserve of its rank. If
  not, no release lets it go, only an operator, a new configuration or its ageing turn. Until then it holds nobody else
  up.
]]
local function fits_alone(one, rank, cost, aged)
  if not one.named then return true end
  local background = rank >= BACKGROUND and not aged and phase_of(one) == "closed"
  local ceiling, budget = ceiling_of(one), one.budget
  if background then ceiling = ceiling - reserve_of(ceiling, one.reserve) end
  if cost > ceiling then return false end
  if budget < 0 then return true end
  if background then budget = budget - reserve_of(budget, -1) end
  return cost <= min(budget, one.budget - one.floors)
end

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
local function probe_live(endpoint, one)
  local units = UNITS .. endpoint
  if one.probe ~= "" and now < one.probe_until_ms and tonumber(call("ZSCORE", units, one.probe) or 0) > now then
    return true
  end
  for _, unit in ipairs(call("ZRANGEBYSCORE", units, now + 1, "+inf")) do
    if unit:sub(1, #HOLD) == HOLD then return true end
  end
  return false
end

-- Units of the group's budget that a call under the lease `parent` may use at another endpoint of the group.
local function lendable(endpoint, parent)
  local lender = parent ~= "" and lease_of(parent)
  if not lender or lender.endpoint == endpoint or endpoint_of(endpoint).budget < 0
    or expiry_of(parent, lender) <= now then
    return 0
  end
  if not endpoint_of(lender.endpoint).named or texts_of(lender.endpoint).group ~= texts_of(endpoint).group then
    return 0
  end
  for _, pair in ipairs(nested()) do
    if pair.child.parent == parent then return 0 end
  end
  return lender.cost
end

--[[
  Why this endpoint would not admit a call now, or nil; and whether only the GPU group stands against it. `parent` is
  the lease under which it is made, nil for none.
]]
local function against(endpoint, rank, cost, aged, parent)
  local one = endpoint_of(endpoint)
  if one.paused then return "paused", false end
  local phase = phase_of(one)
  if phase == "open" then return "breaker_open", false end
  if phase == "half_open" and probe_live(endpoint, one) then return "probing", false end
  local ceiling, units = ceiling_of(one), in_flight(endpoint) + cost
  if units > ceiling then return "endpoint_full", false end
  local background = rank >= BACKGROUND and not aged and phase == "closed"
  local ramp = phase == "closed" and one.breaker and one.ramp ~= -1
  -- A call alone on its endpoint is admissible up to the ceiling, or cost 2 would wait for ever at a limit of 1.
  local ramped = ramp and present(endpoint, one.generation) or 0
  if ramped > 0 and ramped + cost > 1 + one.ramp then return "endpoint_full", false end
  if background then
    local limit = ramp and min(ceiling, 1 + one.ramp)
    if units > ceiling - reserve_of(ceiling, one.reserve)
      or (ramped > 0 and ramped + cost > limit - reserve_of(limit, one.reserve)) then
      return "reserved", false
    end
  end
  if one.budget < 0 then return nil, false end
  local total, set_aside, members = units, 0, { [endpoint] = true }
  for _, other in ipairs(texts_of(endpoint).others) do
    local taken = in_flight(other.id)
    total = total + taken
    set_aside = set_aside + max(0, other.floor - taken)
    members[other.id] = true
  end
  for _, pair in ipairs(nested()) do    -- what is lent counts once
    if members[pair.child.endpoint] and members[pair.parent.endpoint] then
      total = total - min(pair.child.cost, pair.parent.cost)
    end
  end
  if parent then total = total - min(cost, lendable(endpoint, parent)) end
  if background and total > one.budget - reserve_of(one.budget, -1) then return "reserved", true end
  if total + set_aside > one.budget then return "group_full", true end
  return nil, false
end

--[[
  Choose the endpoint for a call: its own, or the fallback while its own breaker is not closed.
  Returns the endpoint; why it would not admit the call, or nil; and whether only the GPU group stands against it.
]]
local function place_call(home, rank, cost, aged, parent)
  local one = endpoint_of(home)
  if not one.named then return home, "paused", false end
  local reason, by_group = against(home, rank, cost, aged, parent)
  if not reason or one.paused or phase_of(one) == "closed" then return home, reason, by_group end
  local fallback = texts_of(home).fallback
  if fallback == "" or not endpoint_of(fallback).named then return home, reason, by_group end
  return fallback, against(fallback, rank, cost, aged, parent)
end

local function mean_of(one)
  return one.mean_ms > 0 and one.mean_ms or FIRST_MEAN_MS
end

-- How often a permit of this endpoint becomes free: mean call over limit.
local function step_ms(endpoint)
  local one, limit = endpoint_of(endpoint), 1
  if one.named then
    limit = ceiling_of(one)
    if one.ramp ~= -1 and one.breaker then limit = min(limit, 1 + one.ramp) end
  end
  return max(1, floor(mean_of(one) / max(1, limit)))
end

--[[
  Give the probe's role to a lease of an endpoint, if it is half-open; a role that had passed on ends its generation.
  Returns whether it is the probe.
]]
local function give_role(id, endpoint)
  local one = endpoint_of(endpoint)
  if phase_of(one) ~= "half_open" then return false end
  if one.probe ~= "" then one.generation = one.generation + 1 end
  one.probe = id
  one.probe_until_ms = now + max(rules.probe_deadline_ms, 4 * mean_of(one))
  changed_endpoints[endpoint] = true
  return true
end
