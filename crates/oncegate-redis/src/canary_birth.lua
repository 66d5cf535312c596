-- Gives the canary a birth where it has none, or where its birth is the one to end. Answers with its birth.
local birth = redis.call('GET', KEYS[1])
if birth and birth ~= ARGV[3] then return birth end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return ARGV[1]
