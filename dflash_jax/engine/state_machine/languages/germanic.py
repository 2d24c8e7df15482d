"""Announcements in English, German, Dutch, Swedish, Norwegian and Danish."""

from dflash_jax.engine.state_machine.languages import language

# Announcements in English.


_ENGLISH_ACTS = (
    r"access|add|adjust|analy[sz]|append|apply|archiv|assembl|assign|attach|audit|back up"
    r"|begin|begun|benchmark|bisect|book|boot|bring up|brows|build|bump|calculat|call|cancel"
    r"|captur|cat\b|chang|chas|check|chmod|clean|clear|click|clon|clos|collect|comb|comment"
    r"|commit|compar|compil|compos|comput|configur|confirm|connect|consult|continu|convert"
    r"|copy|correct|count|craft|crawl|creat|cross-check|debug|decod|decompil|decompress"
    r"|decreas|delet|deploy|descri[bp]|detect|determin|diagnos|dial|dig|disabl|dispatch"
    r"|div[ei]|do(?:ing)? (?:it|that|this|so)|doubl|download|draft|drill|drop|dump|duplicat|edit"
    r"|eject"
    r"|email|emit|enabl|encod|enumerat|escap|estimat|evaluat|examin|execut|explor|export"
    r"|extend|extract|feed|fetch|figur|fil[el]|filter|find|fire|firing|fix|flip|flush|follow"
    r"|fork|format|free|gather|generat|get|glanc|go|go(?:ing)? (?:through|over|ahead)|grab"
    r"|grep|handl|hit|hook|hunt|identif|implement|import|increas|index|initiali[sz]|inject"
    r"|inlin|insert|inspect|install|instrument|interrupt|investigat|isolat|issu|join|jump|kick"
    r"|kill|label|launch|lint|list|load|locat|log|look|loop|lower|mak[ei]|mark|mask|match"
    r"|measur|merg|migrat|modif|mount|mov[ei]|mute|nail|narrow|navigat|nudg|open|organi[sz]"
    r"|overwrit|pack|pars|paste|pasting|patch|peek|perform|pick|pin|plot|plug|pok[ei]|populat"
    r"|post|print|prob[ei]|proceed|process|profil|prun|publish|pull|purg|push|put|quarantin"
    r"|queri|query|raise|raising|rank|re-?\w+|read|refactor|refresh|reload|remov|renam|render"
    r"|replac|reproduc|reset|resolv|respawn|restart|restor|retriev|retry|revert|review|rewrit"
    r"|rip|roll(?:ing)? (?:back|out)|rout|rul(?:e|ing) out|run|sampl|sanit|sav[ei]|scaffold"
    r"|scan|schedul|scrap|scroll|scrub|search|see|send|set|shift|shut|simulat|skim|snapshot"
    r"|sort|spawn|spin|split|squash|ssh|stag|start|stash|step|stop the|strip|study|submit"
    r"|summon|swap|switch|sync|tackl|tag|tail|tak[ei]|terminat|test|tidy|tim|toggl|touch|trac"
    r"|translat|trigger|trim|try|turn|tweak|unblock|uncomment|undo|uninstall|unlock|unmount"
    r"|unpack|unset|untangl|unzip|updat|upgrad|upload|us[ei]|validat|verif|view|visit"
    r"|walk through|wip|wire|wiring|work|wrap|writ|zip|zoom"
)
ENGLISH = language(
    future=(
        r"let me(?: (?:just|quickly|first|now|also|then|go ahead and|try to|start by|begin by))*"
        r"|lemme|let's(?: (?:just|quickly|first|now|also|start by|begin by))*|let us"
        r"|(?:i|we)(?: (?:first|now|also|then|just|still|next|really|quickly))*"
        r"(?:'ll| will| shall|'m going to| am going to|'re going to| are going to"
        r"|'m gonna| gotta|'m off to|'m about to| am about to| need to| have to|'d better"
        r"|'ve got to| must"
        r"| should| want to"
        r"|'d like to| would like to| plan to| intend to| can now| still need to| first need to)"
        r"(?: (?:just|quickly|first|now|also|then|next|immediately|go ahead and|try to|start by"
        r"|begin by|have to|need to|go and))*"
        r"|allow me to|time to|off to|about to|proceeding to|will (?:now|just|quickly|next|first)"
        r"|(?:my|the) next (?:step|move|thing)(?: \w+){0,2} is(?: to)?"
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


GERMAN = language(
    future=(
        r"ich (?:werde|will|muss|möchte)|(?:werde|will|muss|möchte) ich"
        r"|lass(?:t|en sie)? (?:mich|uns)|mal (?:sehen|schauen)"
        r"|(?:ich \w+e|\w+e ich)(?=\b.* (?:jetzt|nun|gleich|kurz|sofort|schnell|zuerst|mal)\b)"
        r"|(?:(?:mein )?(?:als )?nächste[rs]?|erste[rs]?) schritt:?(?: ist)?"
    ),
    opens=(
        r"ich(?= (?!\w+te\b)\w+e\b)|(?!\w+te\b)\w+e ich\b|ich soll|soll ich|\w+en wir\b"
        r"|(?:ich )?(?:teste|starte)\b(?: ich)?|als nächstes|zunächst|zuerst|jetzt"
    ),
    acts=(
        r"les(?:e|en)\b|prüf|schau|\bsehe?n?\b|anseh|nachseh|öffn|start|führ|such|find|test"
        r"|\bhol|ruf|list|untersuch|bearbeit|änder|korrigier|beheb|schreib|erstell|lösch|install"
        r"|berechn|vergleich|\blad|leg\w* .*\ban\b|anleg|abfrag|analys|kontroll|aktualis|ersetz"
        r"|kopier|verschieb|probier|versuch|beginn|\bfang|mach|wechs|bau|kompil|sortier|zähl"
        r"|durch(?:geh|such|lauf|führ)|weiter|wirf|werfe|inspizier|reparier|übersetz|speicher|füg"
        r"|\brechn|nachrechn|kümmer|gleich\w* .*\bab\b|abgleich|heraus|\bhak|nachhak|klär|klick"
        r"|knöpf|log"
        r"|\bgeh|\bnehme\b.*\bvor\b|stell\w* .*(?:um|ein|her)\b|setz\w* .*(?:um|auf|zurück|ein)\b"
        r"|pack|schick|send|entfern|ergänz|erweiter|verbind|konfigur|\bricht|aufräum|räum\w* .*auf"
        r"|bereinig|sicher|beend|stopp|klon|zieh|\btrag|eintrag|buch|generier|extrahier|überprüf"
        r"|validier|mess|protokoll|deploy|commit|merg|push|pull|patch|debug|refaktor|umbenenn"
        r"|benenn\w* .*um|einricht|eingrenz|grenz|verfolg|ermittl|ermittel|recherchier|\bschließ"
        r"|schalt|druck|zeichn|verschaff|werf|wiederhol|zerleg|passe?\b.*\ban\b|anpass|aufruf|nehm"
    ),
    idle=(
        r"\b(?:merke|merken|beacht|berücksicht|erinner|gedulde|weiß|wissen|dank|gern(?:e)? (?:zur"
        r"|zu)"
        r"|nicht|nie(?:mals|mand\w*)?\b|kein\w*|wart|habe|hatte|kenne|denke|glaube|hoffe|verstehe"
        r"|brauche|bitte"
        r"|danke"
        r"|empfehle|könnte|würde|freu|bleib|stehe|melde|vermute|nehme an|finde,|schlage|rate\b"
        r"|meine,"
        r"|bedauer|entschuldig|lasse (?:es|das)|sage|erkläre|erwähn|helf|sehe (?:kein|nur"
        r"|dass|,))"
    ),
    asks=r"\?|\b(?:wenn|falls|sobald|sofern|ob du|ob sie|möchten sie|willst du|soll ich|künftig"
    r"|in zukunft|später|du kannst|sie können|kannst du|können sie)\b",
)


DUTCH = language(
    future=r"ik (?:ga|zal|moet|wil)|laat (?:me|mij|ik|ons)|we gaan|(?:volgende|eerste) stap:?",
    opens=r"ik(?= (?!\w{3,}[dt]e\b)\w+)|(?:ga|zal|moet|wil|kijk|lees"
    r"|open|controleer"
    r"|zoek|start"
    r"|voer|draai|test|pak|haal|bekijk|schrijf|maak) ik|(?:eens )?even(?= \w+en\b)",
    acts=(
        r"controleer|check|\blees|lezen|kijk|bekijk|open|voer|zoek|start|test|analyseer|draai"
        r"|onderzoek"
        r"|pas\w* .*aan|aanpass|wijzig|verbeter|herstel|repareer|maak|schrijf|schrijv|verwijder"
        r"|installeer|haal|\bhal|download|bereken|vergelijk|lijst|doorzoek|laad|laden|bewerk|vind"
        r"|begin|probeer|prober|roep|vervang|hernoem|verplaats|kopieer|bouw|ververs|zien"
        r"|tel\b|tellen|pak"
    ),
    idle=r"\b(?:niet|geen|nooit|altijd|wacht|heb\b|had\b|denk|geloof|hoop|weet\b|begrijp|ben\b"
    r"|kan\b|kon\b|zou\b|onthoud|rekening mee"
    r"|blijf|adviseer|raad|vermoed|laat het|leg .*uit|help|vind dat|hou|zeg|stel voor)",
    asks=r"\?|\b(?:als|zodra|wanneer|indien|mits|wil je|wilt u|voortaan|later|je kunt|u kunt"
    r"|zal ik"
    r"|laat (?:het )?me weten)\b",
)


NORDIC = language(
    future=r"(?:jag|jeg|eg) (?:ska|skal|skall|tänker|tenker|måste|må|vil|vill|kommer att)"
    r"|låt mig|la meg|lad mig|(?:ska|skal|måste|må|vil) (?:jag|jeg)"
    r"|(?:nästa|neste|næste|första|første) (?:steg|skridt|trin):?",
    opens=r"(?:jag|jeg|eg) (?:behöver|trenger)|(?:jag|jeg)(?= \w+r\b)"
    r"|\w+r (?:jag|jeg)\b|(?:nu|nå|först|først|så)(?= \w+r (?:jag|jeg))",
    acts=r"koll|sjekk|tjek|kontroll|läs|les|læs|titt|kig|\bse\b|ser på|öppn|åpn|åbn|kör|kjør"
    r"|kør|sök|søk"
    r"|søg|start|test|undersök|undersøk|undersøg|analys|ändr|endr|ændr|rett|ret\b|rätt|fix"
    r"|skriv|skap"
    r"|opret|opprett|tog bort|ta bort|slett|slet|installer|hämt|hent|ladd|last|beräkn|beregn"
    r"|jämför"
    r"|sammenlign|list|gå igenom|gå gjennom|gennemgå|prov|prøv|find|finn|hitt|börj|begyn|bygg"
    r"|anrop"
    r"|uppdater|oppdater|opdater|rett|räkn|tell",
    idle=r"\b(?:inte|ikke|inga|ingen|aldri|aldrig|alltid|altid|vänt|vent|har\b|hadde|havde|tror"
    r"|kom(?:mer)? ihåg|husk"
    r"|hopp|håp"
    r"|håb|vet\b|ved\b|förstår|forstår|är\b|er\b|kan\b|skulle|stann|rekommender|anbefal|föreslår"
    r"|foreslår"
    r"|förklar|forklar|hjälp|hjelp|hjælp|lämnar det|lar det|svar)",
    asks=r"\?|\b(?:om du|hvis|när du|når du|så snart|så snart du|vill du|vil du|i framtiden"
    r"|senare"
    r"|senere|du kan|skal jeg|ska jag .*\?|säg till|si fra|sig til|dersom|ifall)\b",
)
