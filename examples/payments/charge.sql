-- Changes nothing if the attempt was voided or, with an idempotency key, the payment was charged.
INSERT INTO charges SELECT ?1, ?2, ?3
WHERE NOT EXISTS (SELECT 1 FROM voided WHERE id = ?1 AND attempt >= ?3)
AND NOT (?4 AND EXISTS (SELECT 1 FROM charges WHERE id = ?1))
