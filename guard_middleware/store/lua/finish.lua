--[[
  Release a lease, count how its call ended, perhaps park its message again, and take for the thread that becomes idle.
  Guarantees: a lease is released once (I5) and counts once (I7); what it frees is given away in the same call (I9); a
  late finish never takes a message from somebody else.
  KEYS[1] root             all keys of the guard begin with it
  KEYS[2] namespace        of the message's broker; only with a message
  ARGV[1] now_ms           "" for the server's time; only tests pass a number
  ARGV[2] process          id of the process
  ARGV[3] lease            id of the lease
  ARGV[4] outcome          how the call ended
  ARGV[5] retry_after_ms   the server's hint, 0 for none
  ARGV[6] home             the endpoint in whose line the message belongs
  ARGV[7] park             "", "overloaded" or "denied"
  ARGV[8] take             how many messages to hand over
  ARGV[9] idle             idle threads once this one is, -1 leaves what was reported
  ARGV[10] queue           of the message; this and the next two only with a message
  ARGV[11] message         the broker's id of the delivery
  ARGV[12] worker          the broker's id of the worker whose ack set holds it
  Reply: flat, see include/reply
     1 PARKED
     4 GONE                a repeat: the lease was given back
     5 FINISHED
     6 STOLEN              the lease ran out, and somebody else has the message
]]
--- @include "state"
--- @include "leases"
-- The mean length of an endpoint's calls, smoothed with weight 1/8.
local function smooth(lease)
  if not spec_of(lease.endpoint) then return end
  local one = endpoint_of(lease.endpoint)
  local length_ms = now - lease.started_at_ms
  if one.mean_ms > 0 then length_ms = floor(one.mean_ms + (length_ms - one.mean_ms) / 8 + 0.5) end
  length_ms = max(1, length_ms)
  if one.mean_ms ~= length_ms then
    one.mean_ms = length_ms
    changed_endpoints[lease.endpoint] = true
  end
end

-- The common case, without what the others need: nobody waits, time has ended nothing, and all is well.
do
  local process, lease_id, outcome, home, idle = ARGV[2], ARGV[3], ARGV[4], ARGV[6], tonumber(ARGV[9])
  prefetch({
    "clock", "rules", "epoch", "lines", "process:" .. process, "spec:" .. home, "endpoint:" .. home, "deadlines",
  })
  local known = process_of(process)
  if rules and now - clock.last_run_ms <= 2 * rules.heartbeat_ms and now < clock.due_ms
    and not facts.lines and clock.held_at_ms == huge and not (known and known.held)
    and outcome ~= "overload" and ARGV[7] == "" then
    local message, queue = ARGV[11], ARGV[10]
    local lease = lease_of(lease_id)
    local one = lease and endpoint_of(lease.endpoint)
    if lease and one.open_until_ms == 0 and one.fails == 0 and one.ramp == -1
      and (not message or (lease.message
        and call("SISMEMBER", KEYS[2] .. ":__acks__." .. ARGV[12] .. "." .. queue, message) == 1)) then
      end_lease(lease_id, lease, true)
      if message then call("HDEL", root .. "parked:" .. home .. "\31" .. KEYS[2] .. "\31" .. queue, message) end
      if outcome == "success" then smooth(lease) end
      bury(lease_id, 5, "", 0)
      clock.last_run_ms = now
      if idle >= 0 then set_idle(process, idle) end
      flush()
      return { 5, "", 0, "", 0, 0, 0, -1, 0, facts.epoch or "", 0 }
    end
  end
end

--- @include "grant"
--- @include "capacity"
--- @include "order"
--- @include "breaker"
--- @include "settle"
--- @include "lines"
--- @include "configuration"
--- @include "sweep"
--- @include "rule"
--- @include "waiting"
--- @include "serve"
--- @include "reply"

local PARKED, FINISHED, STOLEN = 1, 5, 6
local MAX_DENIALS, FIRST_DENIAL_MS = 3, 1000

local process, lease_id, outcome, home, park = ARGV[2], ARGV[3], ARGV[4], ARGV[6], ARGV[7]
local namespace, queue, message, worker = KEYS[2], ARGV[10], ARGV[11], ARGV[12]

begin(process, tonumber(ARGV[9]))
local lease, tombstone = lease_of(lease_id)
if tombstone then return answer_again(tombstone, process, tonumber(ARGV[9])) end

-- Count the outcome. Returns whether it counts against the message.
local function count()
  local endpoint = lease.endpoint
  local spec = spec_of(endpoint)
  if not spec then return false end
  if outcome == "success" then smooth(lease) end
  return settle(endpoint, spec, outcome, lease_id, lease, tonumber(ARGV[5]), ceiling_of(endpoint, spec))
end

-- Put the message back into its line, if its outcome and its record allow it. Returns whether it did.
local function park_again(counted)
  local line = lines().name(lease.home, namespace, queue)
  local parked = lines().parked(line, message) or lines().record(lease)
  local not_before_ms = 0
  if park == "overloaded" then
    local spec = spec_of(lease.endpoint)
    if not spec or phase_at(lease.endpoint, spec) == "closed" then return false end
    parked.overloads = parked.overloads + (counted and 1 or 0)
    if parked.overloads >= rules.max_overloads then return false end
    parked.overloaded = true
  else
    if parked.denials >= MAX_DENIALS then return false end
    not_before_ms = now + FIRST_DENIAL_MS * 2 ^ parked.denials
    parked.denials = parked.denials + 1
  end
  local acks = lines().ack_set(namespace, worker, queue)
  if call("SISMEMBER", acks, message) == 0
    or call("HEXISTS", lines().messages(namespace, queue), message) == 0 then
    return false
  end
  if park == "overloaded" then          -- a new place, behind those of its rank
    clock.places = clock.places + 1
    parked.place = clock.places
  end
  call("SREM", acks, message)
  lines().enter(line, message, parked, not_before_ms)
  return true
end

local status, reason, counted = FINISHED, "", false
if lease then
  end_lease(lease_id, lease, true)
  counted = count()
end
if message and (not lease or not lease.message
  or call("SISMEMBER", lines().ack_set(namespace, worker, queue), message) == 0) then
  -- The lease ran out, or the broker took the worker for dead: perhaps somebody else has the message.
  if not lines().withdraw(lines().name(home, namespace, queue), message, worker) then status = STOLEN end
elseif message and park ~= "" and park_again(counted) then
  status, reason = PARKED, park
end
if message and status == FINISHED then lines().forget(lines().name(home, namespace, queue), message) end

local serving = serve(process, tonumber(ARGV[8]), lease_id)
bury(lease_id, status, reason, 0, serving.taken)
return answer(status, process, reason, 0, serving)
