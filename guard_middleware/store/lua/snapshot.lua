--[[
  Read everything.
  Guarantees: changes nothing, not even the time of the last command.
  KEYS[1] root             all keys of the guard begin with it
  ARGV[1] now_ms           "" for the server's time; only tests pass a number
  Reply: {status, at_ms, endpoints, groups, leases, processes, lines}, each of the five a list of lists: endpoint (id,
         ceiling, limit, in_flight, breaker, open_for_ms, generation, trips, ramp, probe, paused, group, mean_ms, rank
         and number of waiters...); group (id, units, budget); lease (id, endpoint, cost, process); process (id, idle);
         line (endpoint, namespace, queue, the first 200 waiters in order...). Of those that stand beside a line the
         first 1000 are counted
     9 DONE
]]
--- @include "state"
--- @include "facts"
--- @include "leases"
--- @include "rule"
--- @include "lines"

-- Count waiters of a rank among those of their endpoint.
local function add_waiters(waiting, endpoint, rank, amount)
  if amount == 0 then return end
  local ranks = waiting[endpoint] or {}
  ranks[rank] = (ranks[rank] or 0) + amount
  waiting[endpoint] = ranks
end

local function snapshot()
  local DONE = 9
  local FIRST, MOST_BESIDE = 200, 1000
  prefetch({ "clock", "lines", "endpoints", "leased", "budgets" })

  -- Waiters by endpoint and rank, those that stand beside a line among them.
  local waiting, standing = {}, {}
  for _, line in ipairs(lines.all()) do
    local parts = lines.parts(line)
    local row = { parts.endpoint, parts.namespace, parts.queue }
    for _, waiter in ipairs(call("ZRANGE", root .. "line:" .. line, 0, FIRST - 1)) do row[#row + 1] = waiter end
    for rank = 0, BACKGROUND do
      add_waiters(waiting, parts.endpoint, rank,
        call("ZCOUNT", root .. "line:" .. line, rank * RANK, "(" .. ("%.0f"):format((rank + 1) * RANK)))
    end
    standing[#standing + 1] = row
  end
  for _, member in ipairs(call("ZRANGE", root .. "held_back", 0, MOST_BESIDE - 1)) do
    local line, waiter = member:match("^(.-\31.-\31.-)\31(.*)$")
    add_waiters(waiting, lines.parts(line).endpoint, lines.waiter(line, waiter).rank, 1)
  end

  local rows, groups, totals, members = {}, {}, {}, {}
  for _, endpoint in ipairs(record("endpoints") or {}) do
    local one, units, group = endpoint_of(endpoint), in_flight(endpoint), texts_of(endpoint).group
    local ceiling = ceiling_of(one)
    totals[group] = (totals[group] or 0) + units
    members[endpoint .. "\31" .. group] = true
    local row = {
      endpoint, ceiling, (one.ramp == -1 or not one.breaker) and ceiling or min(ceiling, 1 + one.ramp), units,
      phase_of(one), max(0, one.open_until_ms - now), one.generation, one.trips, one.ramp, one.probe,
      one.paused and 1 or 0, one.budget >= 0 and group or "", one.mean_ms,
    }
    for rank, amount in pairs(waiting[endpoint] or {}) do
      row[#row + 1] = rank
      row[#row + 1] = amount
    end
    rows[#rows + 1] = row
  end
  for _, one in ipairs(record("left") or {}) do
    totals[one.group] = (totals[one.group] or 0) + in_flight(one.id)
    members[one.id .. "\31" .. one.group] = true
  end
  local lent = nested()
  for group, budget in pairs(record("budgets") or {}) do
    local total = totals[group] or 0
    for _, pair in ipairs(lent) do        -- what is lent counts once
      if members[pair.child.endpoint .. "\31" .. group] and members[pair.parent.endpoint .. "\31" .. group] then
        total = total - min(pair.child.cost, pair.parent.cost)
      end
    end
    groups[#groups + 1] = { group, total, budget }
  end

  local leases, alive = {}, {}
  for _, endpoint in ipairs(record("leased") or {}) do
    for _, id in ipairs(endpoint ~= "" and call("ZRANGEBYSCORE", UNITS .. endpoint, now + 1, "+inf") or {}) do
      local lease = not id:find("\31", 1, true) and lease_of(id)
      if lease then leases[#leases + 1] = { id, lease.endpoint, lease.cost, lease.process } end
    end
  end
  for _, process in ipairs(call("ZRANGE", root .. "alive", 0, -1)) do
    local known = process_of(process)
    if known then alive[#alive + 1] = { process, known.idle } end
  end
  return { DONE, now, rows, groups, leases, alive, standing }
end
