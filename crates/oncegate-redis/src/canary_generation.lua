-- Sets the canary's generation to ARGV[1] if the key is missing or holds the generation to replace, ARGV[3]. Returns the
-- generation that the key holds then. ARGV[2]: the expiry in milliseconds.
local generation = redis.call('GET', KEYS[1])
if generation and generation ~= ARGV[3] then return generation end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return ARGV[1]
