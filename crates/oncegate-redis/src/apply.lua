-- Implements oncegate_core::marker::apply on the server.
-- ARGV holds the operation and the terms that all KEYS share, then for each key the record of a first claim with the caller's
-- token, attempt and fingerprint. Returns one string for each key: a verdict or an error. An error on one key does not affect the
-- others.
-- For 'free', the keys of the results follow those of the markers, if results are kept.
-- 'complete with result', 'happened with result' and 'result' have two keys, of a marker and of its result. The first two have the
-- result after the record; they return the verdict, and the result if the id was done before. 'result' returns the result of a done
-- id.

-- operation: its name. lease, window: in milliseconds. horizon: how long an unresolved marker of the caller is kept, in
-- milliseconds; unresolved: the same in at most once. seen, freed: for 'free' the record that the operator read, and the record
-- to replace it with; otherwise empty.
local operation, guarantee, lease, window, horizon, unresolved, seen, freed =
  ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8]
-- The number of arguments that all keys share.
local SHARED = 8
-- The largest count that a record can hold.
local LARGEST = 4294967295
-- The states whose record has a token and a lease, by their letter in the record.
local HOLD_STATES = { p = 'in progress', w = 'waiting', r = 'reconciling' }

local function is_fingerprint(text)
  return text == '-' or (#text == 18 and not text:find('%D'))
end

local function is_count(text)
  return #text <= 10 and tonumber(text) <= LARGEST
end

-- Decodes a record into a table with its state; returns nil and the reason if it is not valid.
local function read(raw)
  if not raw then return { state = 'absent' } end
  if raw == '1' then return { state = 'done', fingerprint = '-' } end
  if #raw == 20 and raw:find('^%-1%d+$') then return { state = 'done', fingerprint = raw:sub(3) } end
  local kind, fields = raw:match('^v1 (%l) (.*)$')
  if HOLD_STATES[kind] then
    local token, number, base, crashes, effect, lease_ms, horizon_ms, writer_guarantee, fingerprint =
      fields:match('^([%da-f]+) (%d+) (%d+) (%d+) ([nu]) (%d+) (%d+) ([aeb]) (%S+)$')
    if token and #token == 32 and is_count(number) and is_count(base) and is_count(crashes) and #lease_ms <= 15
      and #horizon_ms <= 15 and is_fingerprint(fingerprint) then
      return {
        state = HOLD_STATES[kind], token = token, number = number, base = base, crashes = crashes, effect = effect,
        lease = lease_ms, horizon = horizon_ms, writer_guarantee = writer_guarantee, fingerprint = fingerprint,
      }
    end
  elseif kind == 'x' then
    local number, fingerprint = fields:match('^(%d+) (%S+)$')
    if number and is_count(number) and is_fingerprint(fingerprint) then
      return { state = 'rejected', number = number, fingerprint = fingerprint }
    end
  elseif kind == 'c' then
    local number, base, crashes, effect = fields:match('^(%d+) (%d+) (%d+) ([nu])$')
    if number and is_count(number) and is_count(base) and is_count(crashes) then
      return { state = 'cleared', number = number, base = base, crashes = crashes, effect = effect }
    end
  end
  local version = raw:match('^v(%d+) ')
  if version and version ~= '1' then return nil, 'version ' .. version end
  return nil, 'unreadable'
end

-- pcall, so that an error is returned for its key only.
local call = redis.pcall

local function write(key, value, ms, verdict)
  local reply = call('SET', key, value, 'PX', ms)
  return reply.err and 'error ' .. reply.err or verdict
end

-- Keeps the marker and restarts its expiry.
local function renew_expiry(key, ms, verdict)
  local reply = call('PEXPIRE', key, ms)
  return type(reply) == 'table' and 'error ' .. reply.err or verdict
end

local function delete(key, verdict)
  local reply = call('DEL', key)
  return type(reply) == 'table' and 'error ' .. reply.err or verdict
end

local function format_attempts(number, base, crashes)
  return number .. ' ' .. base .. ' ' .. crashes
end

-- The record of a marker with a token and a lease.
local function format_hold(kind, token, attempts, effect, lease_ms, horizon_ms, writer_guarantee, fingerprint)
  return 'v1 ' .. kind .. ' ' .. token .. ' ' .. attempts .. ' ' .. effect .. ' ' .. lease_ms .. ' ' .. horizon_ms .. ' '
    .. writer_guarantee .. ' ' .. fingerprint
end

local function done(key, fingerprint, verdict)
  return write(key, fingerprint == '-' and '1' or '-1' .. fingerprint, window, verdict)
end

-- The next count, at most the largest that a record can hold.
local function next_count(count)
  return string.format('%.0f', math.min(tonumber(count) + 1, LARGEST))
end

-- The milliseconds since the marker was written; nil if another program changed its expiry, or the clock stepped back.
local function age(key, found)
  local expires_in = call('PTTL', key)
  if type(expires_in) == 'table' then return nil, 'error ' .. expires_in.err end
  if expires_in < 0 or expires_in > tonumber(found.horizon) then return nil end
  return tonumber(found.horizon) - expires_in
end

local function claim(key, token, fingerprint, found)
  local state = found.state
  local function grant(number, base, crashes, effect)
    local attempts = format_attempts(next_count(number), base, crashes)
    local record = format_hold('p', token, attempts, effect, lease, horizon, guarantee, fingerprint)
    return write(key, record, horizon, 'granted ' .. attempts)
  end
  -- The attempt number increases, but nothing runs, so max_attempts does not count it.
  local function grant_in_doubt(base, crashes)
    local attempts = format_attempts(next_count(found.number), next_count(base), crashes)
    local record = format_hold('r', token, attempts, 'u', lease, unresolved, 'a', fingerprint)
    return write(key, record, unresolved, 'in-doubt ' .. attempts)
  end
  if state == 'absent' then return grant('0', '0', '0', 'n') end
  if state == 'cleared' then
    if found.effect == 'u' and guarantee == 'a' then return grant_in_doubt(found.base, found.crashes) end
    return grant(found.number, found.base, found.crashes, found.effect)
  end

  local other_body = found.fingerprint ~= '-' and fingerprint ~= '-' and found.fingerprint ~= fingerprint
  if state == 'done' then return other_body and 'conflict' or 'duplicate' end
  if state == 'rejected' then return other_body and 'conflict' or 'rejected ' .. found.number end

  local in_progress = state == 'in progress'
  if found.token == token then
    local verdict = in_progress and 'granted ' or 'in-doubt '
    return renew_expiry(key, found.horizon, verdict .. format_attempts(found.number, found.base, found.crashes))
  end
  if other_body and not in_progress then return 'conflict' end
  if state == 'waiting' then return grant_in_doubt(found.base, found.crashes) end

  local marker_age, failed = age(key, found)
  if failed then return failed end
  if not marker_age then return renew_expiry(key, found.horizon, 'busy ' .. found.lease) end
  if marker_age <= tonumber(found.lease) then return string.format('busy %.0f', tonumber(found.lease) - marker_age) end
  local crashes = next_count(found.crashes)
  if not in_progress then return grant_in_doubt(found.base, crashes) end
  if other_body then return 'conflict' end
  -- max_attempts does not count the attempt that crashed: crashes are counted separately.
  local base = next_count(found.base)
  if found.writer_guarantee ~= 'a' and guarantee ~= 'a' then return grant(found.number, base, crashes, 'u') end
  return grant_in_doubt(base, crashes)
end

-- An operation of an operator: replaces the marker that the operator read, if it is unchanged or was replaced already. Deletes the
-- result.
local function free(key, raw, found, result_key)
  raw = raw or ''
  if freed == '' then return 'lost' end
  if raw ~= seen and raw ~= freed then return 'lost' end
  if found.state == 'in progress' then
    local marker_age, failed = age(key, found)
    if failed then return failed end
    if not marker_age or marker_age <= tonumber(found.lease) then return 'lost' end
  end
  if result_key then
    local deleted = delete(result_key, 'kept')
    if deleted ~= 'kept' then return deleted end
  end
  return write(key, freed, window, 'kept')
end

local function apply(key, own_claim, result_key)
  local caller = read(own_claim)
  local token, number, fingerprint = caller.token, caller.number, caller.fingerprint
  local raw = call('GET', key)
  if type(raw) == 'table' then return 'error ' .. raw.err end
  local found, unreadable = read(raw)
  if not found then return unreadable end
  if operation == 'claim' then return claim(key, token, fingerprint, found) end
  if operation == 'free' then return free(key, raw, found, result_key) end

  local state = found.state
  local is_claimable = state == 'absent' or state == 'cleared'
  local in_progress = state == 'in progress'
  local in_doubt = state == 'waiting' or state == 'reconciling'
  local is_own = found.token == token and tonumber(found.number) == tonumber(number)

  local function cleared(effect, base)
    if effect == 'n' and found.effect == 'n' and tonumber(found.number) == 1 then return delete(key, 'kept') end
    local kept = found.effect == 'u' and 'u' or effect
    return write(key, 'v1 c ' .. format_attempts(found.number, base or found.base, found.crashes) .. ' ' .. kept, window, 'kept')
  end

  if operation == 'renew' then
    if is_own then return renew_expiry(key, found.horizon, 'kept') end
  elseif operation == 'complete' then
    if (in_progress and is_own) or in_doubt then return done(key, fingerprint, 'done') end
    if state == 'done' then return 'done' end
    if is_claimable then return done(key, fingerprint, 'done lost') end
  elseif operation == 'clear nothing' or operation == 'clear unknown' then
    if is_claimable then return 'kept' end
    if in_progress and is_own then
      -- Not allowed: in at most once an unknown effect is recorded with 'doubt'.
      if operation == 'clear unknown' and guarantee == 'a' then return 'lost' end
      return cleared(operation == 'clear unknown' and 'u' or 'n')
    end
  elseif operation == 'withdraw' then
    if is_claimable then return 'kept' end
    if in_progress and is_own then return cleared('n', next_count(found.base)) end
  elseif operation == 'reject nothing' or operation == 'reject unknown' then
    if is_claimable and guarantee ~= 'a' then return 'kept' end
    if in_progress and is_own then
      if guarantee == 'a' then return write(key, 'v1 x ' .. found.number .. ' ' .. found.fingerprint, window, 'kept') end
      return cleared(operation == 'reject unknown' and 'u' or 'n')
    end
  elseif operation == 'doubt' then
    local function doubted(attempts)
      return write(key, format_hold('w', token, attempts, 'u', lease, horizon, guarantee, fingerprint), horizon, 'kept')
    end
    if state == 'absent' then return doubted(format_attempts(number, number, '0')) end
    if state == 'cleared' then
      -- Late or repeated: the outcome was determined since, or an operator has freed the id.
      if tonumber(number) <= tonumber(found.base) then return 'lost' end
      -- The attempt number never decreases.
      local higher = tonumber(found.number) > tonumber(number) and found.number or number
      return doubted(format_attempts(higher, found.base, found.crashes))
    end
    if is_own then
      local attempts = format_attempts(found.number, found.base, found.crashes)
      local waiting = format_hold(
        'w', token, attempts, found.effect, found.lease, found.horizon, found.writer_guarantee, found.fingerprint
      )
      return write(key, waiting, found.horizon, 'kept')
    end
  elseif operation == 'happened' then
    if in_doubt and is_own then return done(key, fingerprint, 'done') end
  elseif operation == 'did not happen' then
    if in_doubt and is_own then
      return write(key, 'v1 c ' .. format_attempts(found.number, found.base, found.crashes) .. ' n', window, 'kept')
    end
  end
  return 'lost'
end

-- The largest difference between the expiries of a marker and of its result, in milliseconds: Redis 7.0 reads the clock again
-- for each command of a script.
local EXPIRY_TOLERANCE = 1000

-- The result of a done marker: not that of another body, and not one that outlived its own marker, whose expiry was another.
local function result_of(key, result_key, found, fingerprint)
  local other_body = found.fingerprint ~= '-' and fingerprint ~= '-' and found.fingerprint ~= fingerprint
  if found.state ~= 'done' or other_body then return false end
  local result = call('GET', result_key)
  if not result or type(result) == 'table' then return result end
  local expires_in, result_expires_in = call('PTTL', key), call('PTTL', result_key)
  if type(expires_in) == 'table' then return expires_in end
  if type(result_expires_in) == 'table' then return result_expires_in end
  return math.abs(expires_in - result_expires_in) <= EXPIRY_TOLERANCE and result
end

-- Writes the result and the done marker, or neither. The result of a done marker is kept.
local function complete_with_result(key, result_key, own_claim, result)
  local raw = call('GET', key)
  local found = type(raw) ~= 'table' and read(raw)
  if not found then return { apply(key, own_claim), false } end
  if found.state == 'done' then
    local earlier = result_of(key, result_key, found, read(own_claim).fingerprint)
    if type(earlier) == 'table' then return { 'error ' .. earlier.err, false } end
    return { apply(key, own_claim), earlier }
  end
  local stored = write(result_key, result, window, 'stored')
  if stored ~= 'stored' then return { stored, false } end
  local verdict = apply(key, own_claim)
  if verdict:sub(1, 4) ~= 'done' then call('DEL', result_key) end
  return { verdict, false }
end

if operation == 'result' then
  local raw = call('GET', KEYS[1])
  if type(raw) == 'table' then return { 'error ' .. raw.err, false } end
  local found, unreadable = read(raw)
  if not found then return { unreadable, false } end
  local result = result_of(KEYS[1], KEYS[2], found, read(ARGV[SHARED + 1]).fingerprint)
  if type(result) == 'table' then return { 'error ' .. result.err, false } end
  return { 'kept', result }
end
-- The check at the start calls the script without arguments.
local completion = operation and operation:match('^(.*) with result$')
if completion then
  operation = completion
  return complete_with_result(KEYS[1], KEYS[2], ARGV[SHARED + 1], ARGV[SHARED + 2])
end

-- Fast path: nearly every completion finds its own claim unchanged, so that comparing the strings of one MGET is enough. MGET
-- returns no value for keys of other types; those, and all other differences, take the normal path.
local raw_values = operation == 'complete' and call('MGET', unpack(KEYS)) or {}

local answers = {}
local count = #ARGV - SHARED
for i = 1, count do
  local key, own_claim = KEYS[i], ARGV[SHARED + i]
  if raw_values[i] == own_claim then
    answers[i] = write(key, own_claim:sub(-1) == '-' and '1' or '-1' .. own_claim:sub(-18), window, 'done')
  else
    answers[i] = apply(key, own_claim, KEYS[count + i])
  end
end
return answers
