-- Keeps the lock KEYS[1] for another ARGV[2] milliseconds, if it is still the owner's.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
    return 0
end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
