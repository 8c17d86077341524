--[[
  Whether an endpoint and its GPU group have room for a call: rules 4 to 6 of DESIGN section 6 (I1).
]]

local function ceiling_of(endpoint, spec)
  local override = endpoint_of(endpoint).override
  return override >= 0 and override or spec.ceiling
end

-- Units of a limit that background may not take; at least one is always left to it. `fixed` is -1 for the fraction.
local function reserve_of(limit, fixed)
  if limit <= 1 then return 0 end
  return min(fixed >= 0 and fixed or max(1, floor(rules.reserve_fraction * limit + 0.5)), limit - 1)
end

-- Rule 1: no state of this endpoint could ever admit such a call (an override or a ramp only delays).
local function impossible(spec, cost)
  return cost > spec.ceiling or (spec.budget >= 0 and cost > spec.budget - spec.floors)
end

--[[
  Why there is no room for the call, or nil; and whether only the group stands against it. `background` if it may not
  touch the reserve. During a ramp, `ramped` units of the present generation are in flight, and `ramp_limit` may be;
  else both are nil.
]]
local function no_room(endpoint, spec, cost, background, ramped, ramp_limit)
  local ceiling = ceiling_of(endpoint, spec)
  local units = in_flight(endpoint) + cost
  if units > ceiling then return "endpoint_full", false end
  -- A call alone on its endpoint is admissible up to the ceiling, or cost 2 would wait for ever at a limit of 1.
  if ramped and ramped > 0 and ramped + cost > ramp_limit then return "endpoint_full", false end
  if background then
    if units > ceiling - reserve_of(ceiling, spec.reserve) then return "reserved", false end
    if ramped then
      local limit = min(ceiling, ramp_limit)
      if ramped + cost > limit - reserve_of(limit, spec.reserve) then return "reserved", false end
    end
  end
  if spec.budget < 0 then return nil, false end
  local total, set_aside = units, 0
  for _, other in ipairs(texts_of(spec).others) do
    local taken = in_flight(other.id)
    total = total + taken
    set_aside = set_aside + max(0, other.floor - taken)
  end
  if background and total > spec.budget - reserve_of(spec.budget, -1) then return "reserved", true end
  if total + set_aside > spec.budget then return "group_full", true end
  return nil, false
end
