"""Announcements in English."""

from dflash_jax.engine.state_machine.languages.language import language

_ENGLISH_ACTS = (
    r"access|add|adjust|analy[sz]|append|apply|audit|benchmark|boot|brows|build|calculat|call"
    r"|chang|check|clean|clear|click|clon|collect|commit|compar|comput|compil|configur|connect"
    r"|consult|convert|copy|correct|count|crawl|creat|debug|delet|deploy|dig|disabl|div[ei]|doubl"
    r"|download|draft|dump|edit|enabl|examin|execut|explor|export|extract|fetch|find|fix|format"
    r"|gather|generat|get|getting|glanc|go|grab|grep|hunt|implement|import|insert|inspect|install"
    r"|investigat|issu|join|jump|kick|launch|list|load|locat|look|mak[ei]|measur|merg|migrat"
    r"|modif|mov[ei]|navigat|open|patch|peek|pin|ping|pok[ei]|prob[ei]|process|profil|proceed"
    r"|pull"
    r"|push|put|queri|query|re-?\w+|read|remov|renam|replac|reproduc|resolv|restart|retriev|retry"
    r"|review|rewrit|rout|run|sav[ei]|scan|scaffold|scroll|search|see|send|set|shut|skim|sort"
    r"|spin"
    r"|start|stash|step|stop the|submit|switch|tak[ei]|tackl|tail|test|trac|track|trigger|try"
    r"|turn|unpack|updat|upgrad|upload|us[ei]|validat|verif|view|visit|walk through|work|writ"
    r"|figur|do (?:it|that|this|so)|begin|continu|handl|determin|identif|confirm|study|perform"
    r"|bring up|back up|drill|go(?:ing)? (?:through|over|ahead)|follow"
)
ENGLISH = language(
    opens=(
        r"let me(?: (?:just|quickly|first|now|also|then|go ahead and|try to|start by|begin by))*"
        r"|let's(?: (?:just|quickly|first|now|also|start by|begin by))*|let us"
        r"|(?:i|we)(?: (?:first|now|also|then|just|still|next|really|quickly))*"
        r"(?:'ll| will| shall|'m going to| am going to|'re going to| are going to"
        r"|'m gonna|'m about to| am about to| need to| have to|'ve got to| must| should| want to"
        r"|'d like to| would like to| plan to| intend to| can now| still need to| first need to)"
        r"(?: (?:just|quickly|first|now|also|then|next|immediately|go ahead and|try to|start by"
        r"|begin by|have to|need to|go and))*"
        r"|allow me to|time to|(?:my|the) next (?:step|move|thing)(?: \w+){0,2} is(?: to)?"
        r"|(?:the )?first (?:step|thing)(?: \w+){0,3} is(?: to)?|next up is|now to|going to|gonna"
        r"|give me (?:a|one) (?:\w+ )?(?:moment|second|sec|minute|bit) to|what remains is to"
        r"|(?:all )?that(?:'s| is) left is to"
        r"|(?:i'm|i am|we're|we are)(?: (?:now|just|currently|first|next|already))*(?= \w+ing\b)"
    ),
    acts=rf"(?:{_ENGLISH_ACTS})\w*\b",
    idle=(
        r"(?:not|never|always|wait|await|be (?!running|reading|checking)|stop(?! the)|stay|stand"
        r"|leave|keep|remember|remind|recall|assum|hold|paus|skip|refrain|avoid|declin|pass"
        r"|let you"
        r"|miss|hope|hoping|say|admit|not[ei]\b|mention|explain|answer|respond|reply|help|assist"
        r"|guid|know|stick|summar|conclud|clarif|rephras|emphas|stress|tell|give you|giv|shar"
        r"|apologi[sz]|thank|assur|point out|suggest|recommend|ask (?:you|for|that)|warn"
        r"|repeat myself|have|need"
        r"|(?:updat|notify|inform|contact|email|ping|send|call)\w* you\b|using (?!the \w+ tool)"
        r"|getting\b|running (?:on|out|low|into|late)|making progress|going (?!through|over|to)"
        r"|try harder|do better|call it|consider (?:it|this|the)|mak(?:e|ing) (?:it|this"
        r"|that) clear|make sure you"
        r"|take (?:that|it|this) as|us(?:e|ing) (?:the default|that wording|it from)"
        r"|do (?:my|our) best|try (?:my|our) best|get back to you|go with|see you|see (?:that"
        r"|no|an?"
        r"|two|three|several) |seeing|look forward|looking forward|happy|glad|afraid|sorry)"
    ),
    asks=(
        r"\?|^if\b|, if\b|\bif (?:you|needed|necessary|desired|wanted|required|so|not|asked"
        r"|and when|possible|(?:this|that|it) (?:is|helps?|works?|would|sounds?|suits?)|any|there)"
        r"|\b(?:unless|whenever|once you|when you|after you|as soon as you|until you|should you"
        r"|whichever|either way|up to you|let me know|(?:say|give me) the word|for you to"
        r"|you can|you could|you should"
        r"|you may|you might|you'd|you will|you'll|your (?:approval|confirmation|permission"
        r"|go-ahead|decision)|as soon as (?!possible)|we(?:'ll| will) see|next time"
        r"|in (?:the )?future|from now on|going forward|later on"
        r"|later\W*$|tomorrow|anymore|any more|no longer|would you|do you|shall i|should i|can i"
        r"|may i|could i|not (?:be )?able)\b"
    ),
)
