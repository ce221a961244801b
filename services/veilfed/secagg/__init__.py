"""Secure aggregation: the aggregator learns the sum of vectors and none of them (Bonawitz et al. 2017).

What both parties need: vectors over Z/2^64 and Z/2^128, masks, Shamir's shares, what is signed. The institution's side
is client_agent.secagg.Participant, the aggregator's aggregator.secagg.SecureSum; messages are those of
protos/veilfed/v1/secagg.proto, and any transport can carry them. The whole of it in one process:

    form = Format(narrow=7680, wide=0)                        # elements of Z/2^64 and of Z/2^128
    context = Context("job-1", 0, 0, spec_sha256, form)       # one attempt at one round
    server = SecureSum(context, cohort=names, least=3, federation="example.veilfed", bundle_pem=roots)
    clients = {name: Participant.begin(context, credentials[name], allowed=names, least=3, keep=save[name])
               for name in names}
    for name, client in clients.items():                      # save[name](bytes): on disk before anything is sent
        server.take(name, client.advertise())
    server.advance()
    for name in names:
        server.take(name, clients[name].share(server.request(name)))              # MaskingCohort -> Shares
    server.advance()
    total = form.zeros()
    for name in names:
        form.add(total, clients[name].mask(server.request(name), vectors[name]))  # Delivery -> masked vector
        server.take_masked(name)
    server.advance()
    for name in names:
        server.take(name, clients[name].confirm(server.request(name)))            # Survivors -> Confirmation
    server.advance()
    for name in names:
        server.take(name, clients[name].reveal(server.request(name)))             # Confirmations -> Reveal
    server.unmask(total)                                      # in place: the exact sum of the vectors

Whoever does not answer before an `advance` is left out; `total` has the vectors of exactly those who were noted by
`take_masked`. Real numbers become ring elements by veilfed.ring.encode and veilfed.wide_ring.encode.
"""

from veilfed.secagg.cohort import Cohort, Context, threshold
from veilfed.secagg.vectors import Format, Words

__all__ = ["Cohort", "Context", "Format", "Words", "threshold"]
