SELECT name, holder, address, token, until FROM locks WHERE name = ?1
