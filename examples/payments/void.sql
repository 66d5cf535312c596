-- Changes nothing if the payment was charged.
INSERT INTO voided SELECT ?1, ?2 WHERE NOT EXISTS (SELECT 1 FROM charges WHERE id = ?1)
ON CONFLICT DO UPDATE SET attempt = max(attempt, excluded.attempt)
