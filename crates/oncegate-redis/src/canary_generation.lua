-- Sets the canary's generation if the key is missing or holds the generation to replace. Returns the generation.
local generation = redis.call('GET', KEYS[1])
if generation and generation ~= ARGV[3] then return generation end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return ARGV[1]
