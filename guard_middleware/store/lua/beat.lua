--[[
  Renew this process's leases, report what it can run, give back what has not begun, assert what the store lost, and
  take.
  Guarantees: the lease of a process that beats never ends under it (I5); a lease that nobody names and no outstanding
  command explains goes back at once; a released lease does not come back; a repeat hands over the same messages (I11).
  KEYS[1] root             all keys of the guard begin with it
  ARGV[1] now_ms           "" for the server's time; only tests pass a number
  ARGV[2] process          id of the process
  ARGV[3] id               of this beat
  ARGV[4] number           of this beat; one that comes after a later one is out of date, and changes nothing
  ARGV[5] take             how many messages to hand over
  ARGV[6] idle             idle threads of the process
  ARGV[7] worker           the broker's id of its worker
  ARGV[8] leaving          1 if nothing more is to be handed over
  ARGV[9...] lists         each with its length before it: queues (namespace, queue), leases, outstanding commands,
                           leases to give back, leases to assert (lease, endpoint, home, rank, cost, generation,
                           namespace, queue, message, worker)
  Reply: flat, see include/reply
     8 UNCONFIGURED
     9 DONE
]]
--- @include "state"
--- @include "facts"
--- @include "leases"
--- @include "rule"
--- @include "lines"
--- @include "moves"
--- @include "configuration"
--- @include "sweep"
--- @include "waiting"
--- @include "serve"
--- @include "reply"
--- @include "held"
--- @include "arguments"

-- Count a call that still runs. Returns false if somebody else has its message.
local function assert_again(id, held)
  local lease, tombstone = lease_of(id)
  if lease then
    if expiry_of(id, lease) <= now then set_expiry(id, lease, now + rules.lease_ms) end -- no sweep has come so far
    return lease.message ~= nil or held.message == nil
  end
  if tombstone then return true end
  local mine = true
  if held.message then
    local line = lines.name(held.home, held.namespace, held.queue)
    mine = withdraw(line, held.message, held.worker)
    local known = lines.parked(line, held.message)
    if not known then clock.places = clock.places + 1 end
    held.place = known and known.place or clock.places
    if not mine then held.namespace, held.queue, held.message, held.worker = nil, nil, nil, nil end
  end
  may_lease(held.endpoint)
  write_lease(id, held)
  set_expiry(id, held, now + rules.lease_ms)
  return mine
end

local function beat()
  local UNCONFIGURED, DONE = 8, 9
  local DRAIN_BATCH = 500

  local process, beat_id, beat_number, worker = ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[7]
  position = 8
  prefetch({ "clock", "lines", "process:" .. process, "said:" .. process, "leased" })
  local leaving, said = ARGV[8] == "1", record("said:" .. process)
  local outdated = said and beat_number < said.number
  begin(process, outdated and -1 or leaving and 0 or tonumber(ARGV[6]))

  if epoch == "" or not process_of(process) then return answer(UNCONFIGURED, process, "", 0) end
  if outdated then return answer(DONE, process, "", 0) end

  -- What the process can run.
  local queues = {}
  for _ = 1, number() do
    local namespace, queue = text(), text()
    queues[namespace .. "\31" .. queue] = 1
  end
  local known = record("said:" .. process) or { queues = {}, beat = "", number = 0, beaten_at_ms = 0, before_ms = 0 }
  for full in pairs(known.queues) do
    if not queues[full] then call("SREM", consumers_key(full), process) end
  end
  for full in pairs(queues) do
    if not known.queues[full] then
      call("SADD", consumers_key(full), process)
      lines.find(full)
    end
  end
  known.queues, known.worker, known.number = queues, worker, beat_number
  if known.beat ~= beat_id then
    known.beat, known.before_ms, known.beaten_at_ms = beat_id, known.beaten_at_ms, now
  end
  set_record("said:" .. process, known)
  call("ZADD", root .. "alive", now + rules.lease_ms, process)
  clock.due_ms = min(clock.due_ms, now + rules.lease_ms)

  local leases, outstanding, unbegun = list(), list(), list()
  local named, explained = {}, { [beat_id] = true }
  for _, id in ipairs(outstanding) do explained[id] = true end

  local stolen, lost = {}, {}
  for _ = 1, number() do
    local id = text()
    local held = {
      endpoint = text(), home = text(), rank = number(), cost = number(),
      generation = number(), namespace = text(), queue = text(), message = text(), worker = text(),
      process = process, place = 0, deadline_ms = 0, started_at_ms = now,
    }
    if held.message == "" then held.namespace, held.queue, held.message, held.worker = nil, nil, nil, nil end
    named[id] = true
    if not assert_again(id, held) then stolen[#stolen + 1] = id end
  end
  for _, id in ipairs(leases) do
    named[id] = true
    local lease = lease_of(id)
    if lease and expiry_of(id, lease) > now then
      set_expiry(id, lease, now + rules.lease_ms)
    else
      lost[#lost + 1] = id
    end
  end
  for _, id in ipairs(unbegun) do give_back(id) end

  -- A lost reply strands nothing: what this process does not know of goes back, unless it may be younger than the list.
  local again = {}
  for _, id in ipairs(leases_of(process)) do
    local lease = lease_of(id)
    local is_known = named[id] or explained[id] or explained[lease.via]
    if not is_known and lease.started_at_ms < known.before_ms then
      give_back(id)
    elseif lease.via == beat_id then
      again[#again + 1] = id
    end
  end

  local want = leaving and 0 or max(0, tonumber(ARGV[5]))
  local repeated = takes_again(again)
  if #repeated > 0 then
    set_idle(process, max(0, process_of(process).idle - #repeated / TAKE))
    want = 0
  elseif want > 0 then
    local standing = {}
    for index, line in ipairs(lines.all()) do standing[index] = line end
    table.sort(standing, before)
    for _, line in ipairs(standing) do        -- nobody names their endpoints any more
      local parts = lines.parts(line)
      if queues[parts.full] and not endpoint_of(parts.endpoint).named then drain(parts.full, DRAIN_BATCH, line) end
    end
  end
  local serving = serve(process, want, beat_id)
  for _, value in ipairs(serving.takes) do repeated[#repeated + 1] = value end
  serving.takes = repeated
  return answer(DONE, process, "", 0, serving, { lost = lost, stolen = stolen })
end
