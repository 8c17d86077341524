--[[
  Which of the published configurations applies: what `core/configuration.py` says. The result stands in the records of
  the endpoints, in their texts, in the clock's rules, and in the facts `endpoints` (their ids) and `budgets`.
]]

local function recompute()
  -- What was published, each once, with the first of the processes that published it: most publish the same.
  local firsts, published = {}, {}
  local raw = call("HGETALL", root .. "published")
  for index = 1, #raw, 2 do
    local process, packed = raw[index], raw[index + 1]
    if not firsts[packed] or before(process, firsts[packed]) then firsts[packed] = process end
  end
  for packed, process in pairs(firsts) do
    published[#published + 1] = { process = process, one = decode(packed) }
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

  --[[
    An endpoint that leaves its GPU group, because nobody names it any more or a deploy moves it, counts there until its
    last lease has ended: its calls still load the accelerator (I1).
  ]]
  local left, leavers, seen = {}, record("left") or {}, {}
  for _, endpoint in ipairs(record("endpoints") or {}) do
    leavers[#leavers + 1] = { id = endpoint, group = texts_of(endpoint).group, floor = 0 }
  end
  for _, one in ipairs(leavers) do
    local spec, name = merged[one.id], one.id .. "\31" .. one.group
    if one.group ~= "" and not (spec and spec.group == one.group) and in_flight(one.id) > 0 and not seen[name] then
      seen[name] = true
      left[#left + 1] = one
    end
  end
  set_record("left", #left > 0 and left)

  for _, endpoint in ipairs(record("endpoints") or {}) do
    if not merged[endpoint] then
      endpoint_of(endpoint).named = false
      changed_endpoints[endpoint] = true
      set_record("texts:" .. endpoint, false)
    end
  end
  local names = {}
  for endpoint, spec in pairs(merged) do
    names[#names + 1] = endpoint
    local one, budget, floors, others = endpoint_of(endpoint), budgets[spec.group], 0, {}
    for _, member in ipairs(budget and members[spec.group] or {}) do
      if member.id ~= endpoint then
        floors = floors + member.floor
        others[#others + 1] = { id = member.id, floor = member.floor }
      end
    end
    for _, leaver in ipairs(budget and left or {}) do
      if leaver.group == spec.group then others[#others + 1] = leaver end
    end
    one.named, one.ceiling, one.floor, one.reserve = true, spec.ceiling, spec.floor, spec.reserve or -1
    one.breaker, one.fail_threshold, one.base_cooldown_ms = spec.breaker, spec.fail_threshold, spec.base_cooldown_ms
    one.max_cooldown_ms, one.backoff_factor = spec.max_cooldown_ms, spec.backoff_factor
    one.budget, one.floors = budget or -1, floors
    changed_endpoints[endpoint] = true
    set_record("texts:" .. endpoint, { group = spec.group, fallback = spec.fallback, others = others })
    may_lease(endpoint)
  end
  table.sort(names, before)
  set_record("endpoints", #names > 0 and names)
  set_record("budgets", next(budgets) and budgets or false)

  local first
  for _, entry in ipairs(published) do
    if not first or entry.one.revision > first.revision then first = entry.one end
  end
  rules = first and first.rules or default_rules()
end
