SELECT task, version, state FROM states WHERE task = ANY ($1::uuid[])
