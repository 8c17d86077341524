--[[
  Which of the published configurations applies: what `core/configuration.py` says. The result is kept as facts:
  `rules`, `endpoints` (their ids), `budgets`, and `spec:<endpoint>` with what the admission rule asks of its group.
]]

local DEFAULT_RULES = {
  lease_ms = 15000, heartbeat_ms = 2000, hold_ms = 50, ageing_ms = 60000, max_overloads = 3, reserve_fraction = 0.34,
  probe_deadline_ms = 30000, retry_after_cap_ms = 600000,
}

-- What applies to one endpoint: numbers that the admission rule reads, then texts, and those who share its budget.
local function write_spec(spec, budget, members)
  local floors, others = 0, {}
  for _, member in ipairs(budget and members or {}) do
    if member.id ~= spec.id then
      floors = floors + member.floor
      others[#others + 1] = { id = member.id, floor = member.floor }
    end
  end
  set_fact("spec:" .. spec.id, pack_numbers(">dddddddddd", spec.ceiling, spec.floor, spec.reserve or -1,
    spec.breaker and 1 or 0, spec.fail_threshold, spec.base_cooldown_ms, spec.max_cooldown_ms, spec.backoff_factor,
    budget or -1, floors) .. pack({ group = spec.group, fallback = spec.fallback, others = others }))
  specs[spec.id] = nil
end

local function recompute()
  local published = {}
  local raw = call("HGETALL", root .. "published")
  for index = 1, #raw, 2 do
    published[#published + 1] = { process = raw[index], one = decode(raw[index + 1]) }
  end
  table.sort(published, function(one, other) return before(one.process, other.process) end)

  -- Values by name, only those of the highest revision that has the name, in the order of the processes.
  local function newest(values_of)
    local found = {}
    for _, entry in ipairs(published) do
      for _, value in ipairs(values_of(entry.one)) do
        local known = found[value.id]
        if not known or entry.one.revision > known.revision then
          known = { revision = entry.one.revision }
          found[value.id] = known
        end
        if entry.one.revision == known.revision then known[#known + 1] = value end
      end
    end
    return found
  end

  local budgets = {}
  for group, values in pairs(newest(function(one) return one.budgets end)) do
    for _, value in ipairs(values) do budgets[group] = min(value.budget, budgets[group] or value.budget) end
  end

  local merged, members = {}, {}
  for endpoint, values in pairs(newest(function(one) return one.specs end)) do
    local spec = values[1]
    for index = 2, #values do
      local other = values[index]
      spec.ceiling = min(spec.ceiling, other.ceiling)
      spec.floor = min(spec.floor, other.floor)
      if other.reserve then spec.reserve = min(spec.reserve or other.reserve, other.reserve) end
    end
    spec.floor = min(spec.floor, spec.ceiling)
    merged[endpoint] = spec
    members[spec.group] = members[spec.group] or {}
    members[spec.group][#members[spec.group] + 1] = spec
  end

  for _, endpoint in ipairs(record("endpoints") or {}) do
    if not merged[endpoint] then
      set_fact("spec:" .. endpoint, false)
      specs[endpoint] = nil
    end
  end
  local names = {}
  for endpoint, spec in pairs(merged) do
    names[#names + 1] = endpoint
    write_spec(spec, budgets[spec.group], members[spec.group])
    call("SADD", root .. "leased", endpoint)
  end
  table.sort(names, before)
  set_record("endpoints", #names > 0 and names)
  set_record("budgets", next(budgets) and budgets or false)

  local first
  for _, entry in ipairs(published) do
    if not first or entry.one.revision > first.revision then first = entry.one end
  end
  rules = first and first.rules or DEFAULT_RULES
  set_fact("rules", pack_numbers(">dddddddd", rules.lease_ms, rules.heartbeat_ms, rules.hold_ms, rules.ageing_ms,
    rules.max_overloads, rules.reserve_fraction, rules.probe_deadline_ms, rules.retry_after_cap_ms))
end
