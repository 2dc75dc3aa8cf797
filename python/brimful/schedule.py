"""Schedules of pipelines as data: what each rank does in a step, in order.

An action is a stage, a kind and a microbatch, in the grammar of ``torch.distributed.pipelining``: ``0F0`` (forward),
``1B2`` (backward), ``1I2`` and ``1W2`` (backward split into gradients of inputs and of weights), ``0SEND_F0``,
``1RECV_F0``, ``1SEND_B0``, ``0RECV_B0``.

``Schedule(name, ranks, microbatches, stages_per_rank=1)`` makes a built-in one, for fewer microbatches than ranks
too: ``gpipe``, ``1f1b``, ``zb_h1`` and ``zb_h2`` (zero bubble), with several stages a rank ``interleaved_1f1b``,
``looped_bfs`` and ``zb_h1``, with two in a V ``zbv`` and ``dualpipev``, and ``forward_only`` for inference.
``Schedule.from_csv(text)`` reads one, a line a rank, torch's files among them (what means nothing here, such as
``UNSHARD``, is counted in ``ignored``); ``to_csv()`` writes it.

``with_communication()`` adds the sends and receives that follow from the stages' ranks: receives just before what
uses their message, for ranks that block in them, or with ``receives="when_sent"`` beside their sends, for transports
that post them early and hold no messages.

``check()`` decides, and does not try, whether ranks that do their actions in order come to their end. Its result is
true if so; else ``problems`` names what is missing, doubled or misplaced, or ``cycle`` says who waits for whom.
``channel_capacity`` is how many messages a channel holds (None: any number; 0: a send waits for its receive),
``channels`` whether there is one ``by_rank`` (as NCCL) or ``by_stage`` and direction, or a place for each message
(``by_message``, as threads of one process).

``simulate()`` gives each action its time. ``forward``, ``backward_input`` and ``backward_weight`` are times, one for
all stages or one each; ``backward`` is that of a whole backward (None: the sum); ``hop`` is what a message takes to
another rank. ``activation`` is what a forward leaves until its backward, such as bytes, and ``input_share`` the share
that an ``I`` frees. With ``receives_wait=False`` a rank does not wait in a receive but in what uses its message. The
timeline has the ``makespan``, the ``period`` (the longest of a rank's own times from its first action to its last: a
step's time where ranks do not wait for each other between steps), each rank's ``busy`` time and idle share
(``bubbles``; ``bubble`` is that of all), the most microbatches that each stage holds (``peak_live``) and
``activation`` that each rank holds (``peak_bytes``). ``text()`` and ``svg()`` draw it; ``str(schedule)`` and
``schedule.svg()`` do with unit times.

All of it is pure data: any thread may use it, and no device is touched.
"""

from __future__ import annotations

from brimful._C import Schedule, ScheduleCheck, Timeline

__all__ = ["Schedule", "ScheduleCheck", "Timeline"]
