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
--- @include "facts"
--- @include "leases"
--- @include "rule"
--- @include "breaker"
--- @include "lines"
--- @include "moves"
--- @include "configuration"
--- @include "sweep"
--- @include "waiting"
--- @include "serve"
--- @include "reply"

-- The mean length of an endpoint's calls after one more, smoothed with weight 1/8.
local function smooth(mean_ms, length_ms)
  return max(1, mean_ms == 0 and length_ms or floor(mean_ms + (length_ms - mean_ms) / 8 + 0.5))
end

-- The common case, without what the others need: nobody waits, time has ended nothing, and all is well.
local function finish_at_once()
  local process, lease_id, outcome = ARGV[2], ARGV[3], ARGV[4]
  local namespace, queue, message = KEYS[2], ARGV[10], ARGV[11]
  local fields = call("HMGET", STATE, "clock", "lines", "process:" .. process, "endpoint:" .. ARGV[6])
  local packed, known, one = fields[1], fields[3], fields[4]
  if packed and not fields[2] and known and one and ARGV[7] == "" and outcome ~= "overload" then
    local last_run, due, _, _, _, away, held_at, lease_ms, heartbeat_ms, _, _, _, _, _, _, rest =
      numbers(CLOCK, packed)
    local idle, held = numbers(PROCESS, known)
    local mean, _, _, _, _, open_until, _, fails, _, ramp, named = numbers(ENDPOINT, one)
    local lease = now - last_run <= 2 * heartbeat_ms and now < due and held_at == huge and held == 0
      and open_until == 0 and fails == 0 and ramp == -1 and named == 1 and call("GET", LEASE .. lease_id)
    if lease and lease:byte(1) == 76 then
      local _, cost, _, _, started, _, _, texts = numbers(LEASE_NUMBERS, lease, 2)
      if cost == 1 and lease:byte(-1) == 31 and lease:match("^[^\31]*", texts) == ARGV[6]
        and (not message or (lease:find("\31" .. message .. "\31", texts, true)
          and call("SISMEMBER", namespace .. ":__acks__." .. ARGV[12] .. "." .. queue, message) == 1)) then
        call("ZREM", UNITS .. ARGV[6], lease_id)
        call("SET", LEASE .. lease_id, "T" .. pack_numbers(TOMBSTONE, 5, now + lease_ms, away, 0), "PX",
          4 * lease_ms + (injected and 600000 or 0))
        if message then
          call("HDEL", root .. "parked:" .. ARGV[6] .. "\31" .. namespace .. "\31" .. queue, message)
        end
        local written = {}
        if (now - last_run) * STAMPS >= heartbeat_ms then
          written[1], written[2] = "clock", pack_numbers(">d", now) .. packed:sub(9)
        end
        local smoothed = outcome == "success" and smooth(mean, now - started) or mean
        if smoothed ~= mean then
          written[#written + 1] = "endpoint:" .. ARGV[6]
          written[#written + 1] = pack_numbers(">d", smoothed) .. one:sub(9)
        end
        if ARGV[9] ~= "-1" and tonumber(ARGV[9]) ~= idle then
          written[#written + 1] = "process:" .. process
          written[#written + 1] = pack_numbers(PROCESS, ARGV[9], 0)
        end
        if #written > 0 then call("HSET", STATE, unpack(written)) end
        return { 5, packed:sub(rest), -1, 0 }
      end
    end
  end
  return nil
end

-- Count the outcome. Returns whether it counts against the message.
local function count_outcome(lease_id, lease, outcome, retry_after_ms)
  local endpoint = lease.endpoint
  local one = endpoint_of(endpoint)
  if not one.named then return false end
  if outcome == "success" then
    one.mean_ms = smooth(one.mean_ms, now - lease.started_at_ms)
    changed_endpoints[endpoint] = true
  end
  return settle(endpoint, outcome, lease_id, lease, retry_after_ms)
end

-- Put the message back into its line, if its outcome and its record allow it. Returns whether it did.
local function park_again(lease, park, counted)
  local MAX_DENIALS, FIRST_DENIAL_MS = 3, 1000
  local namespace, queue, message, worker = KEYS[2], ARGV[10], ARGV[11], ARGV[12]
  local line = lines.name(lease.home, namespace, queue)
  local parked = lines.parked(line, message) or record_of(lease)
  local not_before_ms = 0
  if park == "overloaded" then
    local one = endpoint_of(lease.endpoint)
    if not one.named or phase_of(one) == "closed" then return false end
    parked.overloads = parked.overloads + (counted and 1 or 0)
    if parked.overloads >= rules.max_overloads then return false end
    parked.overloaded = true
  else
    if parked.denials >= MAX_DENIALS then return false end
    not_before_ms = now + FIRST_DENIAL_MS * 2 ^ parked.denials
    parked.denials = parked.denials + 1
  end
  local acks = lines.ack_set(namespace, worker, queue)
  if call("SISMEMBER", acks, message) == 0
    or call("HEXISTS", lines.messages(namespace, queue), message) == 0 then
    return false
  end
  if park == "overloaded" then          -- a new place, behind those of its rank
    clock.places = clock.places + 1
    parked.place = clock.places
  end
  call("SREM", acks, message)
  lines.enter(line, message, parked, not_before_ms)
  return true
end

local function finish()
  local at_once = finish_at_once()
  if at_once then return at_once end

  local PARKED, FINISHED, STOLEN = 1, 5, 6

  local process, lease_id, outcome, home, park = ARGV[2], ARGV[3], ARGV[4], ARGV[6], ARGV[7]
  local namespace, queue, message, worker = KEYS[2], ARGV[10], ARGV[11], ARGV[12]

  prefetch({
    "clock", "lines", "process:" .. process, "endpoint:" .. home, "texts:" .. home, "said:" .. process, "leased",
  })
  begin(process, tonumber(ARGV[9]))
  local lease, tombstone = lease_of(lease_id)
  if tombstone then return answer_again(tombstone, process, tonumber(ARGV[9])) end

  local status, reason, counted = FINISHED, "", false
  if lease then
    end_lease(lease_id, lease, true)
    counted = count_outcome(lease_id, lease, outcome, tonumber(ARGV[5]))
  end
  if message and (not lease or not lease.message
    or call("SISMEMBER", lines.ack_set(namespace, worker, queue), message) == 0) then
    -- The lease ran out, or the broker took the worker for dead: perhaps somebody else has the message.
    if not withdraw(lines.name(home, namespace, queue), message, worker) then status = STOLEN end
  elseif message and park ~= "" and park_again(lease, park, counted) then
    status, reason = PARKED, park
  end
  if message and status == FINISHED then lines.forget(lines.name(home, namespace, queue), message) end

  local serving = serve(process, tonumber(ARGV[8]), lease_id)
  bury(lease_id, status, reason, 0, serving.taken)
  return answer(status, process, reason, 0, serving)
end
