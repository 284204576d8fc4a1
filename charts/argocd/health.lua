-- Argo CD's health of a BidiKVInference, from its conditions (the table in operator/bidikv_operator/status/summary.py).
--
-- A wave of a sync goes on when everything is Healthy, so a resource whose engines are being replaced is Progressing
-- although it serves. Degraded comes first: a rollout that failed still serves with the earlier engines.

local function result(status, message)
  return { status = status, message = message }
end

if obj.spec ~= nil and obj.spec.paused == true then
  return result("Suspended", "spec.paused is true: nothing is changed")
end

local status = obj.status
if status == nil or status.conditions == nil
    or (status.observedGeneration or 0) < (obj.metadata.generation or 0) then
  return result("Progressing", "the operator has not seen this change yet")
end

local found = {}
for _, condition in ipairs(status.conditions) do
  found[condition.type] = condition
end

local function is_true(name)
  return found[name] ~= nil and found[name].status == "True"
end

local function words(name)
  if found[name] == nil then
    return name .. " is not told"
  end
  return (found[name].reason or "") .. ": " .. (found[name].message or "")
end

if is_true("Degraded") then
  return result("Degraded", words("Degraded"))
end
if is_true("Progressing") or found.Progressing == nil then
  return result("Progressing", words("Progressing"))
end
-- Not Ready, not Progressing and not Degraded is what was asked for: a role of no replicas.
return result("Healthy", words("Ready"))
