"""Will it work here? What ``ckpt-service doctor`` looks at, and what it makes of that.

:mod:`~ckpt_service.doctor.gather` and :mod:`~ckpt_service.doctor.probe` find the facts and disturb nobody;
:mod:`~ckpt_service.doctor.machine` and :mod:`~ckpt_service.doctor.place` judge them, without looking anywhere.
"""
