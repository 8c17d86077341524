--[[
  The waiting lines (I3, I8): a waiter stands in `line:<line>` by rank and place, or in `held_back` until an instant;
  what is remembered of it is in `parked:<line>`. None of these keys has an expiry. A line is
  endpoint \31 namespace \31 queue; callers stand in endpoint \31 \31.
]]

local WINDOW = 16                       -- how many waiters are read at once behind the first ones

local lines = {}

function lines.name(endpoint, namespace, queue)
  return endpoint .. "\31" .. namespace .. "\31" .. queue
end

-- Endpoint, namespace and queue of a line, and the name of the queue ("" for callers).
function lines.parts(line)
  local known = split[line]
  if not known then
    local endpoint, namespace, queue = line:match("^(.-)\31(.-)\31(.*)$")
    local full = namespace .. "\31" .. queue
    known = { endpoint = endpoint, namespace = namespace, queue = queue, full = full ~= "\31" and full or "" }
    split[line] = known
  end
  return known
end

-- The lines in which somebody stands.
function lines.all()
  return record("lines") or {}
end

local function register(line)
  local all = lines.all()
  for _, known in ipairs(all) do
    if known == line then return end
  end
  all[#all + 1] = line
  set_record("lines", all)
end

local function unregister(line)
  local left = {}
  for _, known in ipairs(lines.all()) do
    if known ~= line then left[#left + 1] = known end
  end
  set_record("lines", #left > 0 and left)
end

function lines.ack_set(namespace, worker, queue)
  return namespace .. ":__acks__." .. worker .. "." .. queue
end

function lines.messages(namespace, queue)
  return namespace .. ":" .. queue .. ".msgs"
end

-- What is remembered of a waiter, or false.
function lines.parked(line, waiter)
  local packed = call("HGET", root .. "parked:" .. line, waiter)
  if not packed then return false end
  local rank, cost, place, overloads, denials, overloaded, deadline, rest = numbers(PARKED_NUMBERS, packed)
  return {
    rank = rank, cost = cost, place = place, overloads = overloads, denials = denials, overloaded = overloaded == 1,
    deadline_ms = deadline, process = packed:sub(rest),
  }
end

-- What is remembered of somebody who stands in a line; if the server has evicted that, what the line itself tells.
function lines.waiter(line, waiter)
  local known = lines.parked(line, waiter)
  if known then return known end
  local key = tonumber(call("ZSCORE", root .. "line:" .. line, waiter) or BACKGROUND * RANK)
  return {
    rank = floor(key / RANK), cost = 1, place = key % RANK, overloads = 0, denials = 0, overloaded = false,
    deadline_ms = 0, process = "",
  }
end

function lines.forget(line, waiter)
  call("HDEL", root .. "parked:" .. line, waiter)
end

-- The waiter at an index of a line, and its key in the order; nil behind the last.
function lines.at(line, index)
  local known = windows[line]
  if not known then
    known = { whole = false }
    windows[line] = known
  end
  if not known[index + 1] and not known.whole then
    local size = #known > 0 and WINDOW or 2
    local found = call("ZRANGE", root .. "line:" .. line, #known, #known + size - 1, "WITHSCORES")
    known.whole = #found < 2 * size
    for first = 1, #found, 2 do known[#known + 1] = { waiter = found[first], key = tonumber(found[first + 1]) } end
  end
  local one = known[index + 1]
  if one then return one.waiter, one.key end
end

-- A waiter has left a line.
local function has_left(line, waiter)
  aged_of = {}
  local known = windows[line]
  for index = 1, known and #known or 0 do
    if known[index].waiter == waiter then
      table.remove(known, index)
      if #known > 0 then return end
      break
    end
  end
  windows[line] = nil
  if call("EXISTS", root .. "line:" .. line) == 0 then unregister(line) end
end

function lines.background_waits(endpoint)
  for _, line in ipairs(lines.all()) do
    if lines.parts(line).endpoint == endpoint
      and call("ZCOUNT", root .. "line:" .. line, BACKGROUND * RANK, "+inf") > 0 then
      return true
    end
  end
  return false
end

function lines.stands(line, waiter)
  if call("ZSCORE", root .. "line:" .. line, waiter) then return true end
  return clock.held_at_ms < huge and call("ZSCORE", root .. "held_back", line .. "\31" .. waiter) and true or false
end

local function held_changed()
  local first = call("ZRANGE", root .. "held_back", 0, 0, "WITHSCORES")
  clock.held_at_ms = tonumber(first[2] or huge)
end

-- Stand in a line whose record is written.
function lines.stand(line, waiter, parked)
  windows[line], aged_of = nil, {}
  call("ZADD", root .. "line:" .. line, parked.rank * RANK + parked.place, waiter)
  register(line)
end

function lines.remember(line, waiter, parked)
  call("HSET", root .. "parked:" .. line, waiter, pack_numbers(PARKED_NUMBERS, parked.rank, parked.cost, parked.place,
    parked.overloads, parked.denials, parked.overloaded and 1 or 0, parked.deadline_ms) .. parked.process)
end

-- Stand in a line, or beside it until `not_before_ms`.
function lines.enter(line, waiter, parked, not_before_ms)
  local parts = lines.parts(line)
  if parked.rank >= BACKGROUND and not lines.background_waits(parts.endpoint) then
    local one = endpoint_of(parts.endpoint)
    one.background_at_ms = max(now, one.background_at_ms)
    changed_endpoints[parts.endpoint] = true
  end
  lines.remember(line, waiter, parked)
  if not_before_ms and not_before_ms > now then
    call("ZADD", root .. "held_back", not_before_ms, line .. "\31" .. waiter)
    held_changed()
    clock.due_ms = min(clock.due_ms, not_before_ms)
  else
    lines.stand(line, waiter, parked)
  end
  if parked.deadline_ms > 0 then
    call("ZADD", root .. "deadlines:" .. parts.full, parked.deadline_ms, line .. "\31" .. waiter)
    local firsts = record("deadlines") or {}
    if parked.deadline_ms < (firsts[parts.full] or huge) then
      firsts[parts.full] = parked.deadline_ms
      set_record("deadlines", firsts)
    end
  end
end

function lines.forget_deadline(line, waiter)
  call("ZREM", root .. "deadlines:" .. lines.parts(line).full, line .. "\31" .. waiter)
end

-- Leave a line, or the place beside it; the record stays. Returns whether the waiter stood there.
function lines.leave(line, waiter, parked)
  if clock.held_at_ms < huge and call("ZREM", root .. "held_back", line .. "\31" .. waiter) == 1 then
    held_changed()
  else
    if call("ZREM", root .. "line:" .. line, waiter) == 0 then return false end
    has_left(line, waiter)
  end
  if parked and parked.deadline_ms > 0 then lines.forget_deadline(line, waiter) end
  return true
end

--[[
  Know the lines of a queue again that stand although the state was lost, with all that is kept to save a look at them.
  Asked for by a process that has not said before what it consumes.
]]
function lines.find(full)
  for _, endpoint in ipairs(record("endpoints") or {}) do
    local line = endpoint .. "\31" .. full
    for rank = 0, BACKGROUND do
      local last = call("ZREVRANGEBYSCORE", root .. "line:" .. line, "(" .. ("%.0f"):format((rank + 1) * RANK),
        rank * RANK, "WITHSCORES", "LIMIT", 0, 1)[2]
      if last then
        register(line)
        clock.places = max(clock.places, tonumber(last) % RANK)
      end
    end
  end
  held_changed()
  clock.due_ms = min(clock.due_ms, clock.held_at_ms)
  local deadline = call("ZRANGE", root .. "deadlines:" .. full, 0, 0, "WITHSCORES")[2]
  if deadline then
    local firsts = record("deadlines") or {}
    firsts[full] = min(tonumber(deadline), firsts[full] or huge)
    set_record("deadlines", firsts)
  end
end
