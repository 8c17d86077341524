--[[
  Record a lease that begins now, with the probe's role if it has been given that. Returns when it ends, or false if
  `only` is "NX" and the id is taken.
]]
local function grant(id, lease, only)
  local endpoint = lease.endpoint
  lease.generation = endpoint_of(endpoint).generation
  lease.started_at_ms = now
  if not write_lease(id, lease, only) then return false end
  local expires_at_ms = now + (lease.hold and rules.hold_ms or rules.lease_ms)
  set_expiry(id, lease, expires_at_ms)
  if lease.hold then
    process_of(lease.process).held = true
    changed_processes[lease.process] = true
  elseif lease.rank >= BACKGROUND then
    endpoint_of(endpoint).background_at_ms = now
    endpoint_of(lease.home).background_at_ms = now
    changed_endpoints[endpoint], changed_endpoints[lease.home] = true, true
  end
  return expires_at_ms
end
