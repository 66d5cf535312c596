-- What each key becomes, and what the asker is told: the table of oncegate_core::marker::apply, on the server.
-- KEYS are the keys. ARGV holds the ask and the terms that all keys share, then for each key the record that its asker's
-- claim has: its token, attempt and fingerprint stand in it. The answer is one text for each key: a verdict, or why there
-- is none. No key can spoil another.

local ask, guarantee, lease, window, horizon, unresolved, seen =
  ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
local SHARED = 7
local LARGEST_ATTEMPT = 4294967295
local HELD = { p = 'in progress', w = 'waiting', r = 'reconciling' }

local function is_fingerprint(text)
  return text == '-' or (#text == 18 and not text:find('%D'))
end

-- State, fingerprint, attempt, token, lease, horizon, guarantee; or nil and why the record cannot be read.
local function read(raw)
  if not raw then return 'absent' end
  if raw == '1' then return 'done', '-' end
  if #raw == 19 and raw:find('^1%d+$') then return 'done', raw:sub(2) end
  local kind, rest = raw:match('^v1 (%l) (.*)$')
  if HELD[kind] then
    local token, attempt, ms, keep, promise, body = rest:match('^([%da-f]+) (%d+) (%d+) (%d+) ([aeb]) (%S+)$')
    if token and #token == 32 and #attempt <= 10 and tonumber(attempt) <= LARGEST_ATTEMPT and #ms <= 15 and #keep <= 15
      and is_fingerprint(body) then
      return HELD[kind], body, attempt, token, ms, keep, promise
    end
  elseif kind == 'x' then
    if is_fingerprint(rest) then return 'rejected', rest end
  elseif kind == 'c' then
    if rest:find('^%d+$') and #rest <= 10 and tonumber(rest) <= LARGEST_ATTEMPT then return 'cleared', '-', rest end
  end
  local version = raw:match('^v(%d+) ')
  if version and version ~= '1' then return nil, 'unknown version' end
  return nil, 'unreadable'
end

-- An error is an answer: it is told of its key alone.
local call = redis.pcall

local function put(key, value, ms, verdict)
  local reply = call('SET', key, value, 'PX', ms)
  return reply.err and 'error ' .. reply.err or verdict
end

-- The same marker; its expiry begins anew.
local function keep_anew(key, ms, verdict)
  local reply = call('PEXPIRE', key, ms)
  return type(reply) == 'table' and 'error ' .. reply.err or verdict
end

local function delete(key, verdict)
  local reply = call('DEL', key)
  return type(reply) == 'table' and 'error ' .. reply.err or verdict
end

local function held(kind, token, attempt, ms, keep, promise, body)
  return 'v1 ' .. kind .. ' ' .. token .. ' ' .. attempt .. ' ' .. ms .. ' ' .. keep .. ' ' .. promise .. ' ' .. body
end

local function done(key, fingerprint, verdict)
  return put(key, fingerprint == '-' and '1' or '1' .. fingerprint, window, verdict)
end

local function cleared(key, attempt)
  return put(key, 'v1 c ' .. attempt, window, 'kept')
end

local function after(attempt)
  return string.format('%.0f', math.min(tonumber(attempt) + 1, LARGEST_ATTEMPT))
end

local function claim(key, token, fingerprint, state, body, at, holder, their_lease, their_horizon, promise)
  local function grant(attempt)
    return put(key, held('p', token, attempt, lease, horizon, guarantee, fingerprint), horizon, 'granted ' .. attempt)
  end
  if state == 'absent' then return grant('1') end
  if state == 'cleared' then return grant(after(at)) end

  local other_body = body ~= '-' and fingerprint ~= '-' and body ~= fingerprint
  if state == 'done' then return other_body and 'conflict' or 'duplicate' end
  if state == 'rejected' then return other_body and 'conflict' or 'rejected' end

  local in_progress = state == 'in progress'
  if holder == token then
    return keep_anew(key, their_horizon, (in_progress and 'granted ' or 'in-doubt ') .. at)
  end
  if other_body and not in_progress then return 'conflict' end

  local left = call('PTTL', key)
  if type(left) == 'table' then return 'error ' .. left.err end
  local known = left >= 0 and left <= tonumber(their_horizon)
  local age = tonumber(their_horizon) - left
  local over = known and age > tonumber(their_lease)
  if (in_progress and (other_body or not over)) or (state == 'reconciling' and not over) then
    -- Not written by this protocol alone: it gets its horizon again.
    if not known then return keep_anew(key, their_horizon, 'busy ' .. their_lease) end
    return string.format('busy %.0f', math.max(0, tonumber(their_lease) - age))
  end
  if in_progress and promise ~= 'a' and guarantee ~= 'a' then return grant(after(at)) end
  local attempt = after(at)
  return put(key, held('r', token, attempt, lease, unresolved, 'a', fingerprint), unresolved, 'in-doubt ' .. attempt)
end

local function apply(key, theirs)
  local _, fingerprint, attempt, token = read(theirs)
  local raw = call('GET', key)
  if type(raw) == 'table' then return 'error ' .. raw.err end
  local state, body, at, holder, their_lease, their_horizon, promise = read(raw)
  if not state then return body end
  if ask == 'claim' then
    return claim(key, token, fingerprint, state, body, at, holder, their_lease, their_horizon, promise)
  end

  local free = state == 'absent' or state == 'cleared'
  local in_progress = state == 'in progress'
  local in_doubt = state == 'waiting' or state == 'reconciling'
  local mine = holder == token and tonumber(at) == tonumber(attempt)

  if ask == 'renew' then
    if mine then return keep_anew(key, their_horizon, 'kept') end
  elseif ask == 'complete' then
    if (in_progress and mine) or in_doubt then return done(key, fingerprint, 'done') end
    if state == 'done' then return 'done' end
    if free then return done(key, fingerprint, 'done lost') end
  elseif ask == 'clear nothing' or ask == 'clear unknown' then
    if free then return 'kept' end
    if in_progress and mine then
      if ask == 'clear nothing' and tonumber(at) == 1 then return delete(key, 'kept') end
      -- Never: what is unknown is doubted.
      if ask == 'clear unknown' and guarantee == 'a' then return 'lost' end
      return cleared(key, at)
    end
  elseif ask == 'reject nothing' or ask == 'reject unknown' then
    if free and guarantee ~= 'a' then return 'kept' end
    if in_progress and mine then
      if guarantee == 'a' then return put(key, 'v1 x ' .. body, window, 'kept') end
      if ask == 'reject nothing' and tonumber(at) == 1 then return delete(key, 'kept') end
      return cleared(key, at)
    end
  elseif ask == 'doubt' then
    -- The fence never steps back.
    if state == 'cleared' and tonumber(at) > tonumber(attempt) then attempt = at end
    if free then return put(key, held('w', token, attempt, lease, horizon, guarantee, fingerprint), horizon, 'kept') end
    if mine then return put(key, held('w', holder, at, their_lease, their_horizon, promise, body), their_horizon, 'kept') end
  elseif ask == 'happened' then
    if in_doubt and mine then return done(key, fingerprint, 'done') end
  elseif ask == 'did not happen' then
    if in_doubt and mine then return cleared(key, at) end
  elseif ask == 'forget' then
    if (state == 'rejected' or state == 'done' or in_doubt) and raw == seen then return delete(key, 'kept') end
  end
  return 'lost'
end

-- Nearly every completion finds its own claim as it was written: all are looked for at once, and known without being read.
-- What is no string is not found, and what is not found is looked at alone.
local found = ask == 'complete' and call('MGET', unpack(KEYS)) or {}

local answers = {}
for i, key in ipairs(KEYS) do
  local theirs = ARGV[SHARED + i]
  if found[i] == theirs then
    answers[i] = put(key, theirs:sub(-1) == '-' and '1' or '1' .. theirs:sub(-18), window, 'done')
  else
    answers[i] = apply(key, theirs)
  end
end
return answers
